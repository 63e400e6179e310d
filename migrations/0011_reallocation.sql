-- What waited where it was.

-- Every time that an execution was parked: where, since when, until when (null: it is parked now),
-- how that ended, and why it was parked.
CREATE VIEW parked_times AS
SELECT p.execution,
       e.client_id,
       e.tenant,
       p.node,
       p.at                                                       AS parked_at,
       coalesce(u.at, l.ended_at)                                 AS until,
       coalesce(u.at, l.ended_at, now()) - p.at                   AS waited,
       CASE WHEN u.at IS NOT NULL THEN 'went on'
            WHEN l.ended_at IS NOT NULL THEN 'left'
       END                                                        AS ended_by,
       p.detail                                                   AS why
FROM execution_events p
JOIN executions e ON e.id = p.execution
LEFT JOIN placements l ON l.execution = p.execution AND l.epoch = p.epoch
LEFT JOIN LATERAL (
    SELECT x.at
    FROM execution_events x
    WHERE x.execution = p.execution
      AND x.epoch = p.epoch
      AND x.ordinal > p.ordinal
      AND x.kind = 'unparked'
    ORDER BY x.ordinal
    LIMIT 1
) u ON true
WHERE p.kind = 'parked';
