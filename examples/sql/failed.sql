-- What failed, or is held after a failure, whose fault was it, why, and what did the program say at its end?
SELECT finished_at, coalesce(client_id, execution::text) AS execution, program, node, crashes,
       fault_owner, fault, failure, stderr_tail
FROM execution_summary
WHERE phase IN ('failed', 'held')
ORDER BY finished_at DESC
LIMIT 50;
