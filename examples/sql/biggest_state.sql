-- Which executions have the largest state, and which commit the most bytes?
SELECT coalesce(client_id, execution::text) AS execution, program, phase,
       pg_size_pretty(last_state_bytes) AS last_state, commits,
       pg_size_pretty(state_bytes) AS committed_in_all
FROM execution_summary
WHERE last_state_bytes IS NOT NULL
ORDER BY last_state_bytes DESC, state_bytes DESC
LIMIT 20;
