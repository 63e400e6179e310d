-- What waits, for how long, and why? (What holds at this very moment: `fiec why ID`.)
SELECT coalesce(client_id, execution::text) AS execution, program, phase, waiting, why, rejected,
       would_help, last_candidates, nodes_known
FROM why_pending
ORDER BY waiting DESC
LIMIT 100;
