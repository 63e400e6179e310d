-- What did operators ask for in the last week, of executions and of nodes?
SELECT at, who, what, coalesce(client_id, execution::text) AS execution, node, detail
FROM operator_actions
WHERE at >= now() - interval '7 days'
ORDER BY at DESC
LIMIT 200;
