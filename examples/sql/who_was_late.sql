-- What was not done by its deadline, or is late now? The latest first.
SELECT coalesce(client_id, execution::text) AS execution, tenant, priority, phase, due_at,
       finished_at, late_by, on_miss
FROM late_executions
WHERE late
ORDER BY late_by DESC
LIMIT 50;
