-- Deadlines as they stand after what was changed about them.

CREATE INDEX execution_events_adjusted ON execution_events (execution, ordinal) WHERE kind = 'adjusted';
CREATE INDEX execution_events_parked ON execution_events (at) WHERE kind = 'parked';

-- The deadline that somebody has given an execution last, of those that were given one after they
-- were submitted; read out of the sentence that the event is told by, such as
-- `changed by ann: priority 5, due 7200 s after its submission, else it fails`.
CREATE VIEW changed_deadlines AS
SELECT DISTINCT ON (c.execution)
       c.execution, c.due_at, c.within_s, c.on_miss, c.who, c.at
FROM (
    SELECT w.execution, w.ordinal, w.who, w.at,
           substring(w.words FROM '^(?:priority -?\d+, )?due at ([0-9TZ:.+-]+)')::timestamptz AS due_at,
           substring(w.words FROM '^(?:priority -?\d+, )?due (\d+) s after its submission')::bigint AS within_s,
           CASE WHEN w.words ~ '^(?:priority -?\d+, )?due [^,]*, else it fails' THEN 'fail'
                ELSE 'go_on' END AS on_miss
    FROM (
        SELECT v.execution, v.ordinal, v.who, v.at,
               substr(v.detail, length('changed by ' || v.who || ': ') + 1) AS words
        FROM execution_events v
        WHERE v.kind = 'adjusted'
    ) w
) c
WHERE c.due_at IS NOT NULL OR c.within_s IS NOT NULL
ORDER BY c.execution, c.ordinal DESC;

-- Every execution that has a deadline, by its submission or by a later change (`fiec adjust`): when
-- it was due, and whether it was late.
CREATE OR REPLACE VIEW late_executions AS
SELECT d.execution,
       d.client_id,
       d.tenant,
       d.priority,
       d.phase,
       d.submitted_at,
       d.due_at,
       d.finished_at,
       coalesce(d.finished_at, now()) > d.due_at              AS late,
       greatest(coalesce(d.finished_at, now()) - d.due_at, interval '0') AS late_by,
       d.on_miss,
       d.changed_by
FROM (
    SELECT e.id                                               AS execution,
           e.client_id,
           e.tenant,
           coalesce((e.spec ->> 'priority')::integer, 0)      AS priority,
           e.phase,
           e.submitted_at,
           coalesce(l.due_at, e.submitted_at + l.within_s * interval '1 second') AS due_at,
           e.finished_at,
           l.on_miss,
           l.changed_by
    FROM executions e
    JOIN (
        SELECT c.execution, c.due_at, c.within_s, c.on_miss, c.who AS changed_by
        FROM changed_deadlines c
        UNION ALL
        SELECT x.id, (x.spec -> 'deadline' ->> 'at')::timestamptz, (x.spec -> 'deadline' ->> 'within_s')::bigint,
               coalesce(x.spec -> 'deadline' ->> 'on_miss', 'go_on'), NULL
        FROM executions x
        WHERE x.spec ? 'deadline' AND NOT EXISTS (SELECT FROM changed_deadlines k WHERE k.execution = x.id)
    ) l ON l.execution = e.id
) d;

-- Each tenant: what it holds, what waits, and the slot-time that it had in the last hour and day. What
-- stands aside with its process has given way too.
CREATE OR REPLACE VIEW tenant_shares AS
WITH live AS (
    SELECT e.tenant,
           count(*) FILTER (WHERE e.phase IN ('bound', 'started')) AS holds,
           count(*) FILTER (WHERE e.phase = 'pending')             AS waits
    FROM executions e
    WHERE e.phase IN ('pending', 'bound', 'started')
    GROUP BY e.tenant
), used AS (
    SELECT e.tenant,
           sum(greatest(coalesce(p.ended_at, now()) - greatest(p.started_at, now() - interval '1 hour'),
                        interval '0'))                             AS last_hour,
           sum(coalesce(p.ended_at, now()) - greatest(p.started_at, now() - interval '1 day')) AS last_day
    FROM placements p
    JOIN executions e ON e.id = p.execution
    WHERE p.started_at IS NOT NULL
      AND coalesce(p.ended_at, now()) > now() - interval '1 day'
    GROUP BY e.tenant
), gave AS (
    SELECT e.tenant, count(*) AS gave_way
    FROM (
        SELECT r.execution FROM rebindings r
        WHERE r.cause = 'preempted' AND r.at > now() - interval '1 day'
        UNION ALL
        SELECT v.execution FROM execution_events v
        WHERE v.kind = 'parked' AND v.at > now() - interval '1 day'
          AND v.detail LIKE 'keeps its %: gave way to another %'
    ) g
    JOIN executions e ON e.id = g.execution
    GROUP BY e.tenant
)
SELECT tenant,
       coalesce(holds, 0)                                          AS holds,
       coalesce(waits, 0)                                          AS waits,
       coalesce(last_hour, interval '0')                           AS slot_time_last_hour,
       coalesce(last_day, interval '0')                            AS slot_time_last_day,
       round(100 * extract(epoch FROM last_day)
             / nullif(sum(extract(epoch FROM last_day)) OVER (), 0), 1) AS percent_of_last_day,
       coalesce(gave_way, 0)                                       AS gave_way_last_day
FROM live
FULL JOIN used USING (tenant)
FULL JOIN gave USING (tenant);
