-- Why did executions move? The last fifty rebindings, each with its cause in words.
SELECT at, coalesce(client_id, execution::text) AS execution, epoch, from_node, to_node, why,
       boundary, gap_ms
FROM rebinding_history
ORDER BY at DESC
LIMIT 50;
