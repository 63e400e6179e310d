-- How far is each batch that has not ended, and what has become of the last twenty?
SELECT coalesce(name, batch::text) AS batch, tenant, executions,
       completed, failed, cancelled,
       executions - completed - failed - cancelled AS live,
       pending, started, paused,
       first_submitted_at, first_started_at, last_finished_at, took
FROM batch_summary
ORDER BY ended, first_submitted_at DESC
LIMIT 20;
