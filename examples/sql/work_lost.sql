-- How much work was lost with nodes? For each placement that ended without a yield: the time from
-- its last committed boundary to its end, which is the most that had to be computed again.
SELECT coalesce(p.client_id, p.execution::text) AS execution, p.epoch, p.node, p.end_reason,
       p.ended_at,
       p.ended_at - coalesce(p.computed_until, p.computing_since) AS at_most_lost
FROM placement_timeline p
WHERE p.end_reason IN ('lost', 'not_taken', 'unseen') AND p.computing_since IS NOT NULL
ORDER BY at_most_lost DESC NULLS LAST
LIMIT 50;
