-- Whom were the last choices of a node made from, and why were the others rejected?
SELECT at, execution, epoch, cause, chosen, fiec_candidates_in_words(candidates, omitted) AS candidates
FROM decisions
WHERE at >= now() - interval '1 day'
ORDER BY at DESC
LIMIT 50;
