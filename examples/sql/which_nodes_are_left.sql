-- Which nodes are moved away from most, and why?
SELECT from_node, cause, signal, count(*) AS moves, max(at) AS last_time
FROM rebinding_history
WHERE from_node IS NOT NULL AND from_node <> to_node
GROUP BY from_node, cause, signal
ORDER BY moves DESC, from_node;
