-- What ran on which node in the last hour, and how did it end there?
SELECT node, coalesce(client_id, execution::text) AS execution, epoch, cause, bound_at, waited,
       held, end_reason, gap_ms
FROM placement_timeline
WHERE bound_at >= now() - interval '1 hour'
ORDER BY node, bound_at
LIMIT 200;
