-- How far is each of the last twenty batches?
SELECT b.first_seen_at, coalesce(b.name, b.id::text) AS batch, b.tenant, count(*) AS executions,
       count(*) FILTER (WHERE e.phase = 'completed') AS completed,
       count(*) FILTER (WHERE e.phase = 'failed')    AS failed,
       count(*) FILTER (WHERE e.phase = 'held')      AS held,
       count(*) FILTER (WHERE e.finished_at IS NULL) AS live
FROM (SELECT * FROM batches ORDER BY first_seen_at DESC LIMIT 20) b
JOIN executions e ON e.batch_id = b.id
GROUP BY b.id, b.name, b.tenant, b.first_seen_at
ORDER BY b.first_seen_at DESC;
