-- How what there is was shared, who was late, and who gave way to whom.

-- Every execution that has a deadline in its submission: when it was due, and whether it was late.
-- A deadline that was changed later is in the events of the execution (`adjusted`), not here.
CREATE VIEW late_executions AS
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
       d.on_miss
FROM (
    SELECT e.id                                               AS execution,
           e.client_id,
           e.tenant,
           coalesce((e.spec ->> 'priority')::integer, 0)      AS priority,
           e.phase,
           e.submitted_at,
           coalesce((e.spec -> 'deadline' ->> 'at')::timestamptz,
                    e.submitted_at + (e.spec -> 'deadline' ->> 'within_s')::bigint * interval '1 second') AS due_at,
           e.finished_at,
           coalesce(e.spec -> 'deadline' ->> 'on_miss', 'go_on') AS on_miss
    FROM executions e
    WHERE e.spec ? 'deadline'
) d;

-- Each tenant: what it holds, what waits, and the slot-time that it had in the last hour and day.
CREATE VIEW tenant_shares AS
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
    FROM rebindings r
    JOIN executions e ON e.id = r.execution
    WHERE r.cause = 'preempted' AND r.at > now() - interval '1 day'
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
