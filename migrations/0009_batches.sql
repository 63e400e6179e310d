-- Whole batches in one row each. A batch that was submitted by name has one; the lines of one
-- message, and the elements of an array, are a batch without a name.
CREATE VIEW batch_summary AS
SELECT b.id                                                        AS batch,
       b.name,
       b.tenant,
       count(*)                                                    AS executions,
       count(*) FILTER (WHERE e.phase = 'pending')                 AS pending,
       count(*) FILTER (WHERE e.phase = 'bound')                   AS bound,
       count(*) FILTER (WHERE e.phase = 'started')                 AS started,
       count(*) FILTER (WHERE e.phase = 'paused')                  AS paused,
       count(*) FILTER (WHERE e.phase = 'verifying')               AS verifying,
       count(*) FILTER (WHERE e.phase = 'completed')               AS completed,
       count(*) FILTER (WHERE e.phase = 'failed')                  AS failed,
       count(*) FILTER (WHERE e.phase = 'cancelled')               AS cancelled,
       min(e.submitted_at)                                         AS first_submitted_at,
       min(e.first_started_at)                                     AS first_started_at,
       max(e.finished_at)                                          AS last_finished_at,
       bool_and(e.finished_at IS NOT NULL)                         AS ended,
       CASE WHEN bool_and(e.finished_at IS NOT NULL)
            THEN max(e.finished_at) ELSE now() END
           - min(e.submitted_at)                                   AS took,
       sum(e.rebindings)::bigint                                   AS rebindings,
       fiec_interval(sum(e.compute_us)::bigint)                    AS computed
FROM batches b
JOIN executions e ON e.batch_id = b.id
GROUP BY b.id, b.name, b.tenant;

COMMENT ON VIEW batch_summary IS
    'One row for each batch: its executions by phase, first and last times';
