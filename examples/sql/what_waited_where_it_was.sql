-- What was parked in the last day: where, for how long, how that ended, and why.
SELECT coalesce(client_id, execution::text) AS execution, node, parked_at, waited, ended_by, why
FROM parked_times
WHERE parked_at > now() - interval '1 day'
ORDER BY parked_at DESC
LIMIT 50;
