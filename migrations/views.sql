-- Views and functions for people. `fiec setup` applies this file whenever it has changed, in one
-- transaction. How to add a view: README.md. The role fiec_reader may read each of them: see 0003.
--
-- Durations are intervals, short ones milliseconds. Null is "not measured", never zero.

-- ---------------------------------------------------------------------------------------------------
-- Functions

-- Microseconds as milliseconds with three digits.
CREATE OR REPLACE FUNCTION fiec_ms(us bigint) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT round(us / 1000.0, 3) $$;

-- Microseconds as an interval.
CREATE OR REPLACE FUNCTION fiec_interval(us bigint) RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT us * interval '1 microsecond' $$;

-- Microjoules as joules.
CREATE OR REPLACE FUNCTION fiec_joules(uj bigint) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT round(uj / 1e6, 6) $$;

-- A decision's candidates, one sentence each. A candidate on a device names it.
CREATE OR REPLACE FUNCTION fiec_candidates_in_words(candidates jsonb, omitted integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT string_agg(
               (c.value ->> 'node') || coalesce(' (' || (c.value ->> 'substrate') || ')', '') || ': ' ||
               CASE
                   WHEN jsonb_array_length(coalesce(c.value -> 'rejected', '[]')) > 0 THEN
                       'rejected, ' || (SELECT string_agg(r, '; ') FROM jsonb_array_elements_text(c.value -> 'rejected') r)
                   WHEN c.value ? 'score' THEN
                       'acceptable, score ' || round((c.value ->> 'score')::numeric, 4)
                   ELSE 'acceptable'
               END,
               E'\n' ORDER BY c.ordinality)
           || CASE WHEN omitted > 0 THEN E'\nand ' || omitted || ' more' ELSE '' END
    FROM jsonb_array_elements(candidates) WITH ORDINALITY c
$$;

-- A quota for people.
CREATE OR REPLACE FUNCTION fiec_quota_in_words(running bigint, devices bigint, memory_bytes bigint, waiting bigint,
                                               weight integer)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(nullif(concat_ws(', ', $1 || ' running', $2 || ' on devices',
                                     $3 || ' bytes of memory', $4 || ' waiting', 'weight ' || $5), ''), 'no limits')
$$;

-- ---------------------------------------------------------------------------------------------------
-- Executions

CREATE OR REPLACE VIEW execution_summary AS
SELECT e.id                                             AS execution,
       e.tenant,
       e.client_id,
       e.program,
       e.phase,
       e.node,
       e.epoch,
       e.boundary_index                                 AS boundary,
       coalesce(e.boundary_of, e.capsules)              AS boundaries_in_all,
       e.progress_note                                  AS progress,
       e.submitted_at,
       e.first_started_at,
       e.finished_at,
       e.first_started_at - e.submitted_at              AS waited,
       coalesce(e.finished_at, now()) - e.submitted_at  AS age,
       (SELECT sum(coalesce(p.ended_at, e.finished_at, now()) - coalesce(p.computing_since, p.started_at))
        FROM placements p WHERE p.execution = e.id)     AS ran,
       fiec_interval(e.compute_us)                      AS computed,
       e.rebindings,
       e.pressure_rebindings,
       e.crashes,
       e.node_faults,
       e.infrastructure_faults,
       e.commits,
       e.state_bytes,
       e.last_state_bytes,
       encode(e.state_digest, 'hex')                    AS state_digest,
       e.contract,
       e.spec -> 'labels'                               AS labels,
       e.batch_id                                       AS batch,
       e.batch_line,
       -- Age of the work that no commit holds: what the loss of its node would take.
       CASE WHEN e.phase = 'started' THEN
           now() - greatest(e.computed_until, e.bound_at)
       END                                              AS uncommitted,
       e.requested,
       e.requested_by,
       e.result,
       e.failure,
       e.fault,
       e.fault_owner,
       e.stderr_tail,
       fiec_joules(e.host_uj)                           AS host_joules,
       fiec_joules(e.device_uj)                         AS device_joules,
       -- Share of the intervals between commits in which it was measured.
       CASE WHEN e.host_uj IS NOT NULL OR e.device_uj IS NOT NULL THEN
           round(greatest(e.host_intervals, e.device_intervals)::numeric
                 / nullif(e.commits + (e.phase = 'completed')::integer, 0), 4)
       END                                              AS energy_coverage,
       (SELECT count(*) FROM rebindings r
        WHERE r.execution = e.id AND r.cause <> 'resumed') AS moves
FROM executions e;

COMMENT ON VIEW execution_summary IS 'boundary: the last that was committed; one that has completed has reached all, of which the last need no commit; waited, age, ran: by the broker''s clock; ran: from the first capsule to the end of each placement, in all; moves: rebindings but those after a pause or a retry; computed: in capsules alone; of an execution that has not ended, age and ran end by PostgreSQL''s clock; crashes: of its whole life, of which only those since the last commit count against retries; node_faults, infrastructure_faults: of its whole life, they never count; fault_owner: program, node, infrastructure or submission';

-- One row for each batch. A batch that was submitted by name has one; the lines of one message, and
-- the elements of an array, are a batch without a name.
CREATE OR REPLACE VIEW batch_summary AS
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
       fiec_interval(sum(e.compute_us)::bigint)                    AS computed,
       count(*) FILTER (WHERE e.phase = 'held')                    AS held,
       CASE WHEN count(e.client_id) < count(*) THEN NULL
            WHEN min(e.client_id) = max(e.client_id) THEN min(e.client_id)
            WHEN regexp_replace(min(e.client_id), '-[0-9]+$', '')
                 = regexp_replace(max(e.client_id), '-[0-9]+$', '')
            THEN regexp_replace(min(e.client_id), '-[0-9]+$', '') || '-*'
       END                                                         AS ids_like
FROM batches b
JOIN executions e ON e.batch_id = b.id
GROUP BY b.id, b.name, b.tenant;

COMMENT ON VIEW batch_summary IS
    'One row for each batch: its executions by phase, first and last times; ids_like: the client''s ids of its executions, where the first and the last of them differ in a number at the end alone';

CREATE OR REPLACE VIEW placement_timeline AS
SELECT p.execution,
       e.client_id,
       e.tenant,
       p.epoch,
       p.node,
       p.substrate,
       p.cause,
       p.bound_at,
       p.started_at,
       p.computing_since,
       p.computed_until,
       p.ended_at,
       p.end_reason,
       p.started_at - p.bound_at                        AS waited,
       coalesce(p.ended_at, now()) - p.started_at       AS held,
       fiec_ms(p.gap_us)                                AS gap_ms,
       p.instance,
       fiec_joules(p.host_uj)                           AS host_joules,
       fiec_joules(p.device_uj)                         AS device_joules
FROM placements p
JOIN executions e ON e.id = p.execution;

COMMENT ON VIEW placement_timeline IS 'waited, held, gap_ms: by the broker''s clock; of a placement that has not ended, held ends by PostgreSQL''s clock';

CREATE OR REPLACE VIEW rebinding_history AS
SELECT r.execution,
       e.client_id,
       e.tenant,
       r.epoch,
       r.at,
       r.from_node,
       r.to_node,
       r.cause,
       r.cause_detail                                   AS why,
       r.signal,
       r.device,
       round(r.value::numeric, 4)                       AS value,
       r.high,
       r.low,
       fiec_interval(r.dwell_ms * 1000::bigint)         AS dwell,
       r.since                                          AS pressed_since,
       r.at - r.since                                   AS pressed_for,
       r.state_index                                    AS boundary,
       r.state_bytes,
       encode(r.state_digest, 'hex')                    AS state_digest,
       r.yielded_at,
       fiec_ms(r.gap_us)                                AS gap_ms,
       fiec_interval(r.gap_us)                          AS gap,
       r.vector
FROM rebindings r
JOIN executions e ON e.id = r.execution;

-- Every time that an execution was parked: where, since when, until when (null: it is parked now),
-- how that ended, and why it was parked.
CREATE OR REPLACE VIEW parked_times AS
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

-- ---------------------------------------------------------------------------------------------------
-- Faults

-- Each fault of an execution: where, what, and whose it was. Only crashes of the program count
-- against retries. A worker that goes away says nothing: its placement ends as lost.
CREATE OR REPLACE VIEW execution_faults AS
SELECT v.at,
       v.execution,
       e.client_id,
       e.tenant,
       v.epoch,
       v.node,
       v.fault_owner                                    AS owner,
       v.fault,
       v.kind                                           AS event,
       v.detail
FROM execution_events v
JOIN executions e ON e.id = v.execution
WHERE v.fault IS NOT NULL
  -- An execution that gives up fails with its last crash, or is held with it.
  AND NOT (v.kind IN ('failed', 'held') AND EXISTS (
      SELECT FROM execution_events c
      WHERE c.execution = v.execution AND c.ordinal = v.ordinal AND c.kind = 'crashed'))
UNION ALL
SELECT p.ended_at,
       p.execution,
       e.client_id,
       e.tenant,
       p.epoch,
       p.node,
       'node',
       'worker_died',
       'lost',
       'the worker went away while it computed'
FROM placements p
JOIN executions e ON e.id = p.execution
WHERE p.end_reason = 'lost' AND p.started_at IS NOT NULL
  -- What the broker had lost, and `fiec repair` began anew, was no worker's.
  AND NOT EXISTS (
      SELECT FROM execution_events h
      WHERE h.execution = p.execution AND h.ordinal = p.ended_in AND h.kind = 'healed');

-- ---------------------------------------------------------------------------------------------------
-- Deadlines

-- The last deadline that somebody gave an execution after its submission.
CREATE OR REPLACE VIEW changed_deadlines AS
SELECT DISTINCT ON (x.execution)
       x.execution,
       (x.change -> 'deadline' ->> 'at')::timestamptz          AS due_at,
       (x.change -> 'deadline' ->> 'within_s')::bigint         AS within_s,
       coalesce(x.change -> 'deadline' ->> 'on_miss', 'go_on') AS on_miss,
       x.who,
       x.at
FROM execution_changes x
WHERE coalesce(x.change #>> '{deadline,at}', x.change #>> '{deadline,within_s}') IS NOT NULL
ORDER BY x.execution, x.ordinal DESC, x.nth DESC;

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

-- ---------------------------------------------------------------------------------------------------
-- Why an execution waits, or is where it is

-- The verdict on an execution since it began to wait.
CREATE OR REPLACE FUNCTION fiec_waits(of uuid, since timestamptz) RETURNS SETOF waiting_verdicts
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT * FROM waiting_verdicts w WHERE w.execution = $1 AND w.at >= $2
$$;

-- The fields of a submission that decide where it may be placed. Two executions with the same fields
-- wait for the same. A batch counts if it limits how many run, or what starts together.
CREATE OR REPLACE FUNCTION fiec_wants(spec jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT spec - '{id,params,labels,priority,deadline,expected_s,commit,retries,array,after,verify,when_unviable,reallocation}'::text[]
                - CASE WHEN spec ?| '{at_once,gang}'::text[] THEN '' ELSE 'batch' END
$$;

-- True of an execution that somebody, or its own program, has changed since it was submitted.
CREATE OR REPLACE FUNCTION fiec_adjusted(execution uuid) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT EXISTS (
        SELECT FROM execution_events v
        WHERE v.execution = $1 AND v.kind = 'adjusted'
          AND v.at >= (SELECT e.submitted_at FROM executions e WHERE e.id = $1) - interval '1 hour')
$$;

-- The executions that must end before this one and have not; null if there are none.
CREATE OR REPLACE FUNCTION fiec_awaits(execution uuid) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT 'it waits for ' || string_agg(
               a.name || CASE a.how WHEN 'any' THEN ' to end' ELSE ' to complete' END
               || ' (it is ' || CASE a.phase WHEN 'started' THEN 'computing'
                                             ELSE coalesce(a.phase, 'not known here') END || ')',
               ', ' ORDER BY a.n) FILTER (WHERE a.n <= 5)
           || CASE WHEN count(*) > 5 THEN ' and ' || count(*) - 5 || ' others' ELSE '' END
    FROM (
        SELECT d ->> 'id' AS name, d ->> 'on' AS how, x.phase, row_number() OVER (ORDER BY place) AS n
        FROM executions e,
             jsonb_array_elements(e.spec -> 'after') WITH ORDINALITY AS deps (d, place)
        LEFT JOIN LATERAL (
            SELECT x.phase, x.finished_at
            FROM executions x
            WHERE x.tenant = e.tenant
              AND (x.client_id = d ->> 'id'
                   OR x.id = CASE WHEN d ->> 'id' ~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$'
                                  THEN (d ->> 'id')::uuid END)
            ORDER BY x.finished_at IS NULL DESC LIMIT 1
        ) x ON true
        WHERE e.id = $1 AND x.finished_at IS NULL
    ) a
$$;

-- The last verdict on pending executions, one row for all that want the same.
CREATE OR REPLACE VIEW waiting_alike AS
SELECT DISTINCT ON (o.tenant, fiec_wants(o.spec))
       o.tenant,
       fiec_wants(o.spec)                               AS wants,
       o.id                                             AS execution,
       coalesce(o.client_id, o.id::text)                AS name,
       regexp_replace(t.summary, '^pending for [0-9.]+ m?s: ', '') AS summary,
       t.at,
       t.candidates,
       t.omitted,
       t.would_help,
       fiec_candidates_in_words(t.candidates, t.omitted) AS rejected_in_words,
       (SELECT string_agg(h, E'\n') FROM jsonb_array_elements_text(t.would_help) h) AS help_in_words
FROM waiting_verdicts t
JOIN executions o ON o.id = t.execution
WHERE o.finished_at IS NULL AND o.phase = 'pending' AND o.spec IS NOT NULL AND NOT o.spec ? 'after'
  AND t.at >= greatest(o.submitted_at, o.bound_at, o.yielded_at)
  AND NOT EXISTS (SELECT FROM execution_events v WHERE v.execution = o.id AND v.kind = 'adjusted')
ORDER BY o.tenant, fiec_wants(o.spec), t.at DESC;

-- Each execution that waits: why, and what was said of each node when a node was last chosen for it.
-- The policy service alone knows what holds at this moment: `fiec why ID`.
--
-- A row costs no more than the look-ups that its execution needs: a decision only if it was bound, an
-- event only if it has a second message. Whether it was adjusted is asked of all and answered from
-- one set. Words that many rows share are made once, in waiting_alike.
CREATE OR REPLACE VIEW why_pending AS
SELECT e.id                                             AS execution,
       e.client_id,
       e.tenant,
       e.program,
       e.phase,
       e.epoch,
       now() - greatest(e.submitted_at, e.bound_at, e.yielded_at, ev.at) AS waiting,
       CASE
           WHEN e.phase = 'bound' THEN
               'bound to ' || e.node || ', which has not started it'
               || CASE
                      WHEN n.node IS NULL THEN ' (the node is not known here)'
                      WHEN n.status <> 'up' THEN ' (the node is ' || n.status || ')'
                      WHEN n.running >= n.slots THEN ' (all ' || n.slots || ' slots are busy, '
                           || coalesce(n.queued, 0) || ' wait)'
                      ELSE ''
                  END
           WHEN w.summary IS NOT NULL THEN w.summary
           WHEN awaits.words IS NOT NULL THEN 'pending: ' || awaits.words
           WHEN alike.summary IS NOT NULL THEN
               'pending, as ' || alike.name || ', which wants the same: ' || alike.summary
           WHEN ev.kind IS NOT NULL THEN 'waits for a node since it was ' || ev.kind || ': ' || ev.detail
           WHEN e.epoch = 0 THEN 'has never been bound: no node was acceptable when it was last looked at, '
                                 || 'or it was not looked at yet'
           ELSE 'waits for a node'
       END                                              AS why,
       CASE WHEN d.at IS NOT NULL
            THEN fiec_candidates_in_words(d.candidates, d.omitted)
       END                                              AS last_candidates,
       d.at                                             AS last_decided_at,
       known.words                                      AS nodes_known,
       CASE WHEN w.execution IS NULL THEN alike.rejected_in_words
            ELSE fiec_candidates_in_words(w.candidates, w.omitted)
       END                                              AS rejected,
       CASE WHEN w.execution IS NULL THEN alike.help_in_words
            ELSE (SELECT string_agg(h, E'\n') FROM jsonb_array_elements_text(w.would_help) h)
       END                                              AS would_help,
       coalesce(w.at, alike.at)                         AS told_at
FROM executions e
LEFT JOIN nodes n ON n.node = e.node
-- OFFSET 0 keeps PostgreSQL from moving the condition behind the look-up.
LEFT JOIN LATERAL (
    SELECT d.candidates, d.omitted, d.at
    FROM (SELECT e.id, e.submitted_at - interval '1 hour' AS since WHERE e.epoch > 0 OFFSET 0) had
    CROSS JOIN LATERAL (
        SELECT d.candidates, d.omitted, d.at
        FROM decisions d
        -- With the bound on time, PostgreSQL passes over whole days of partitions.
        WHERE d.execution = had.id AND d.at >= had.since
        ORDER BY d.ordinal DESC LIMIT 1
    ) d
) d ON true
LEFT JOIN LATERAL (
    SELECT v.kind, v.detail, v.at
    FROM (SELECT e.id, e.submitted_at - interval '1 hour' AS since WHERE e.ordinal > 1 OFFSET 0) had
    CROSS JOIN LATERAL (
        SELECT v.kind, v.detail, v.at
        FROM execution_events v
        WHERE v.execution = had.id AND v.at >= had.since AND v.kind IN ('yielded', 'refused', 'resumed')
        ORDER BY v.ordinal DESC LIMIT 1
    ) v
) ev ON true
LEFT JOIN LATERAL fiec_waits(e.id, greatest(e.submitted_at, e.bound_at, e.yielded_at, ev.at)) w
    ON e.phase = 'pending'
CROSS JOIN LATERAL (
    SELECT CASE WHEN e.phase = 'pending' AND w.execution IS NULL AND e.spec ? 'after'
                THEN fiec_awaits(e.id) END AS words
) awaits
LEFT JOIN waiting_alike alike
    ON e.phase = 'pending' AND w.execution IS NULL AND awaits.words IS NULL
   AND alike.tenant = e.tenant AND alike.wants = fiec_wants(e.spec)
   AND NOT EXISTS (SELECT FROM execution_events v WHERE v.execution = e.id AND v.kind = 'adjusted')
CROSS JOIN LATERAL (
    SELECT coalesce(
               string_agg(
                   k.node || ': ' || k.status
                   || CASE WHEN k.cordoned THEN ', cordoned' ELSE '' END
                   || CASE WHEN k.draining THEN ', draining' ELSE '' END
                   || CASE WHEN k.viability IS NOT NULL THEN ', ' || k.viability ELSE '' END
                   || CASE WHEN e.program IS NOT NULL AND k.programs IS NOT NULL
                                AND NOT e.program = ANY (k.programs)
                           THEN ', does not run ' || e.program ELSE '' END
                   || CASE WHEN k.running >= k.slots THEN ', all slots busy' ELSE '' END,
                   E'\n' ORDER BY k.node),
               'no node has joined') AS words
    FROM (SELECT * FROM nodes ORDER BY node LIMIT 50) k
) known
WHERE e.finished_at IS NULL AND e.phase IN ('pending', 'bound');

-- Why an execution is where it is, or is not: what `fiec why` says, as far as it was recorded. Of a
-- placed execution: the cause of its last binding, the evidence, and the candidates. Of a pending one:
-- why it must be bound anew and which candidates were rejected, by its own verdict or by that of
-- another execution that wants the same.
CREATE OR REPLACE FUNCTION why(execution uuid)
RETURNS TABLE (
    phase          text,
    node           text,                      -- where it is; null: nowhere
    substrate      text,
    epoch          bigint,
    from_node      text,                      -- where it came from
    cause          text,                      -- initial, pressure, operator, …
    cause_in_words text,
    evidence       jsonb,                     -- {node, signal, device, value, threshold, since, vector}
    at             timestamptz,               -- of the binding, or of the last verdict
    summary        text,
    candidates     jsonb,                     -- [{node, score | rejected: [reason]}]
    omitted        integer,
    would_help     jsonb                      -- [sentence]
)
LANGUAGE sql STABLE AS $$
    SELECT e.phase,
           CASE WHEN e.phase IN ('bound', 'started') THEN e.node END,
           CASE WHEN e.phase IN ('bound', 'started') THEN e.substrate END,
           e.epoch,
           r.from_node,
           CASE WHEN e.phase IN ('bound', 'started') THEN p.cause ELSE p.end_reason END,
           CASE WHEN e.phase NOT IN ('bound', 'started') THEN ev.detail
                WHEN p.epoch = 1 THEN 'first placement'
                ELSE r.cause_detail END,
           CASE WHEN r.signal IS NOT NULL THEN jsonb_strip_nulls(jsonb_build_object(
               'node', r.from_node, 'signal', r.signal, 'device', r.device, 'value', r.value,
               'threshold', jsonb_build_object('high', r.high, 'low', r.low, 'dwell_ms', r.dwell_ms),
               'since', to_char(r.since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'vector', r.vector)) END,
           coalesce(w.at, alike.at, p.bound_at, e.submitted_at),
           CASE e.phase
               WHEN 'pending' THEN coalesce(
                   w.summary,
                   'pending: ' || awaits.words,
                   'pending, as ' || alike.name || ', which wants the same: ' || alike.summary,
                   'it waits; nothing was told of it yet')
               WHEN 'bound' THEN 'bound to ' || e.node || ' under epoch ' || e.epoch
               WHEN 'started' THEN 'computing on ' || e.node || ' under epoch ' || e.epoch
               WHEN 'paused' THEN 'paused by ' || coalesce(e.paused_by, 'somebody')
               WHEN 'held' THEN 'held: ' || coalesce(e.failure, '')
               WHEN 'failed' THEN 'failed: ' || coalesce(e.failure, '')
               ELSE e.phase
           END,
           CASE WHEN e.phase = 'pending' THEN coalesce(w.candidates, alike.candidates)
                ELSE d.candidates END,
           CASE WHEN e.phase = 'pending' THEN coalesce(w.omitted, alike.omitted)
                ELSE d.omitted END,
           coalesce(w.would_help, alike.would_help, '[]')
    FROM executions e
    LEFT JOIN placements p ON p.execution = e.id AND p.epoch = e.epoch
    LEFT JOIN rebindings r ON r.execution = e.id AND r.epoch = e.epoch
    LEFT JOIN LATERAL (
        SELECT d.candidates, d.omitted
        FROM decisions d
        WHERE d.execution = e.id AND d.epoch = e.epoch
          AND d.at >= e.submitted_at - interval '1 hour'
        ORDER BY d.ordinal DESC LIMIT 1
    ) d ON true
    LEFT JOIN LATERAL (
        SELECT v.detail, v.at
        FROM execution_events v
        WHERE v.execution = e.id AND v.at >= e.submitted_at - interval '1 hour'
          AND v.kind IN ('yielded', 'refused', 'paused', 'resumed', 'held', 'retried', 'stepped_back')
        ORDER BY v.ordinal DESC LIMIT 1
    ) ev ON true
    LEFT JOIN LATERAL fiec_waits(
        e.id, greatest(e.submitted_at, e.bound_at, e.yielded_at, ev.at)) w ON e.phase = 'pending'
    LEFT JOIN LATERAL (SELECT fiec_awaits(e.id) AS words) awaits
        ON e.phase = 'pending' AND w.execution IS NULL AND e.spec ? 'after'
    LEFT JOIN LATERAL (
        SELECT a.name, a.summary, a.at, a.candidates, a.omitted, a.would_help
        FROM waiting_alike a
        WHERE e.phase = 'pending' AND w.execution IS NULL AND awaits.words IS NULL
          AND a.tenant = e.tenant AND a.wants = fiec_wants(e.spec) AND NOT fiec_adjusted(e.id)
        LIMIT 1
    ) alike ON true
    WHERE e.id = $1
$$;

-- ---------------------------------------------------------------------------------------------------
-- Numbers over time

-- What programs report by name (`run.progress(loss=0.31)`), by boundary: one curve for each name of an
-- execution, wherever it ran. A point that stands for several reports has their mean.
CREATE OR REPLACE VIEW execution_series AS
SELECT p.execution,
       e.client_id,
       e.tenant,
       e.batch_id,
       p.name,
       p.boundary,
       p.mean                                           AS value,
       p.lowest,
       p.highest,
       p.reports,
       p.at,
       l.node,
       p.epoch
FROM series_points p
LEFT JOIN executions e ON e.id = p.execution
LEFT JOIN placements l ON l.execution = p.execution AND l.epoch = p.epoch;

-- Each name of an execution: where its curve stands, and between what it has moved.
CREATE OR REPLACE VIEW execution_numbers AS
SELECT p.execution,
       p.name,
       max(p.boundary)                                  AS boundary,
       (array_agg(p.mean ORDER BY p.boundary DESC))[1]  AS last,
       min(p.lowest)                                    AS lowest,
       max(nullif(p.highest, 'NaN'))                    AS highest,
       least(sum(p.reports), 9223372036854775807)::bigint AS reports
FROM series_points p
GROUP BY p.execution, p.name;

COMMENT ON VIEW execution_numbers IS 'The last value of each number that a program reports, and its range';

COMMENT ON VIEW execution_series IS
    'Numbers that programs report by name, by boundary, with the node where they were computed';

-- ---------------------------------------------------------------------------------------------------
-- Ranges of tiles

-- Every execution that computes, or computed, a whole: the one that was submitted, its parts, their
-- parts, and so on.
CREATE OR REPLACE VIEW spread_members AS
WITH RECURSIVE members AS (
    SELECT DISTINCT s.holder AS whole, s.holder AS execution, NULL::uuid AS holder, 0 AS depth
    FROM spread_splits s
    WHERE NOT EXISTS (SELECT FROM spread_splits above WHERE above.part = s.holder)
    UNION ALL
    SELECT m.whole, s.part, s.holder, m.depth + 1
    FROM members m
    JOIN spread_splits s ON s.holder = m.execution
    WHERE m.depth < 64
)
SELECT whole, execution, holder, depth FROM members;

-- Each part: its range, its phase, and how many tiles it has done itself. That holds where a capsule
-- is a tile: a merge is a capsule that is none, and so may be the last capsule of a range.
CREATE OR REPLACE VIEW spread_parts AS
SELECT m.whole,
       w.client_id,
       w.tenant,
       s.holder,
       s.part,
       s.from_tile,
       s.to_tile,
       s.to_tile - s.from_tile                          AS tiles,
       coalesce(e.phase, 'not made yet')                AS phase,
       e.node,
       greatest(least(e.boundary_index - (
           SELECT count(*) FROM spread_splits own WHERE own.holder = s.part AND own.merged_at IS NOT NULL
       ), s.to_tile - s.from_tile), 0)                  AS tiles_done,
       s.split_at,
       e.first_started_at,
       e.finished_at,
       s.merged_at,
       e.rebindings,
       fiec_interval(e.compute_us)                      AS computed,
       s.nth,
       s.dropped_at
FROM spread_splits s
JOIN spread_members m ON m.execution = s.part
LEFT JOIN executions w ON w.id = m.whole
LEFT JOIN executions e ON e.id = s.part;

COMMENT ON VIEW spread_parts IS 'Each part that an execution has split off, and where it stands';

-- The outputs of a whole: its own and those of all its parts, as far as they count. An output stays
-- with the execution that made it.
CREATE OR REPLACE VIEW whole_outputs AS
SELECT m.whole,
       m.execution                                      AS made_by,
       o.value ->> 'name'                               AS name,
       (o.value ->> 'bytes')::bigint                    AS bytes,
       o.value ->> 'digest'                             AS digest,
       v.boundary,
       v.at
FROM spread_members m
JOIN LATERAL (
    SELECT b.index AS boundary, b.committed_at AS at, b.outputs
    FROM boundaries b
    WHERE b.execution = m.execution AND b.outputs IS NOT NULL AND b.withdrawn_at IS NULL
    UNION ALL
    SELECT e.capsules, e.finished_at, e.outputs
    FROM executions e
    WHERE e.id = m.execution AND e.outputs IS NOT NULL
) v ON true
CROSS JOIN LATERAL jsonb_array_elements(v.outputs) o;

COMMENT ON VIEW whole_outputs IS
    'What an execution that was split and all of its parts have made; of others: boundaries, executions';

-- ---------------------------------------------------------------------------------------------------
-- Tenants and operators

-- Each tenant: how many executions hold a place or wait, and the slot-time of the last hour and day.
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
    -- An execution that stands aside with its process has given way too.
    SELECT e.tenant, count(*) AS gave_way
    FROM (
        SELECT r.execution FROM rebindings r
        WHERE r.cause = 'preempted' AND r.at > now() - interval '1 day'
        UNION ALL
        SELECT v.execution FROM execution_events v
        WHERE v.kind = 'parked' AND v.at > now() - interval '1 day' AND v.cause = 'preempted'
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

-- Every change of a quota with the quota before it, and until when it held (null: it holds).
CREATE OR REPLACE VIEW quota_history AS
SELECT c.tenant,
       c.at,
       lead(c.at) OVER w                                AS until,
       c.who,
       coalesce(lag(fiec_quota_in_words(c.running, c.devices, c.memory_bytes, c.waiting, c.weight))
                OVER w, 'no limits')                    AS before,
       fiec_quota_in_words(c.running, c.devices, c.memory_bytes, c.waiting, c.weight) AS after,
       c.running,
       c.devices,
       c.memory_bytes,
       coalesce(c.weight, 1)                            AS weight,
       c.waiting
FROM quota_changes c
WINDOW w AS (PARTITION BY c.tenant ORDER BY c.seq);

-- Who asked for what: of executions, of nodes, of tenants.
CREATE OR REPLACE VIEW operator_actions AS
SELECT v.at,
       v.who,
       v.kind                                           AS what,
       v.execution,
       e.client_id,
       e.tenant,
       v.node,
       v.detail
FROM execution_events v
JOIN executions e ON e.id = v.execution
WHERE v.who IS NOT NULL AND v.who <> 'program'
UNION ALL
SELECT r.at,
       r.who,
       'moved',
       r.execution,
       e.client_id,
       e.tenant,
       r.to_node,
       'moved from ' || coalesce(r.from_node, 'nowhere') || ' to ' || r.to_node
FROM rebindings r
JOIN executions e ON e.id = r.execution
WHERE r.cause = 'operator'
UNION ALL
SELECT n.at, n.who, n.what, NULL, NULL, NULL, n.node, n.detail
FROM node_events n
WHERE n.who IS NOT NULL
UNION ALL
SELECT q.at, q.who, 'quota', NULL, NULL, q.tenant, NULL, q.before || ' → ' || q.after
FROM quota_history q;

-- ---------------------------------------------------------------------------------------------------
-- Nodes
--
-- All that a node says of its machine is in nodes.descriptor; these views are the usual questions.
-- Rates are bytes a second.

-- Each place that executes: the host, and each GPU or MIG slice, with the number of executions there.
CREATE OR REPLACE VIEW node_substrates AS
SELECT n.node,
       n.status,
       s.value ->> 'id'                                  AS substrate,
       s.value ->> 'kind'                                AS kind,
       s.value ->> 'name'                                AS name,
       (s.value ->> 'memory_bytes')::bigint              AS memory_bytes,
       s.value #>> '{device,compute_capability}'         AS compute_capability,
       (s.value #>> '{device,multiprocessors}')::integer AS multiprocessors,
       s.value #>> '{device,bus}'                        AS bus,
       CASE WHEN s.value ->> 'kind' = 'cpu' THEN n.descriptor #> '{profile,contracts}'
            ELSE s.value #> '{device,contracts}' END     AS contracts,
       (s.value #>> '{device,to_device_bytes_s}')::bigint   AS to_device_bytes_s,
       (s.value #>> '{device,from_device_bytes_s}')::bigint AS from_device_bytes_s,
       s.value #>> '{device,missing}'                    AS not_measured_because,
       n.descriptor #>> '{profile,libraries,nvidia_driver}' AS driver,
       n.descriptor #>> '{profile,libraries,cuda_driver}'   AS cuda,
       held.executions                                   AS holds
FROM nodes n
CROSS JOIN LATERAL jsonb_array_elements(coalesce(n.descriptor -> 'substrates', '[]')) s
LEFT JOIN LATERAL (
    SELECT count(*) AS executions
    FROM executions e
    WHERE e.finished_at IS NULL AND e.phase IN ('bound', 'started')
      AND e.node = n.node AND e.substrate = s.value ->> 'id'
) held ON true;

-- Each memory node (NUMA, CXL) of each machine.
CREATE OR REPLACE VIEW node_memory AS
SELECT n.node,
       (m.value ->> 'id')::integer                       AS memory_node,
       m.value ->> 'tier'                                AS tier,      -- local, or far: without processors
       m.value ->> 'cpus'                                AS cpus,
       (m.value ->> 'memory_bytes')::bigint              AS memory_bytes,
       (m.value ->> 'copy_bytes_s')::bigint              AS copy_bytes_s,
       (m.value ->> 'latency_ns')::double precision      AS latency_ns,
       (m.value ->> 'sample_bytes')::bigint              AS sample_bytes,
       (m.value ->> 'firmware_read_bytes_s')::bigint     AS firmware_read_bytes_s,
       (m.value ->> 'firmware_read_ns')::bigint          AS firmware_read_ns,
       m.value ->> 'missing'                             AS not_measured_because
FROM nodes n
CROSS JOIN LATERAL jsonb_array_elements(coalesce(n.descriptor #> '{profile,memory}', '[]')) m;

-- Each node: its machine, and how its worker may confine programs there.
CREATE OR REPLACE VIEW node_profiles AS
SELECT n.node,
       n.status,
       n.host,
       n.cpus,
       (n.descriptor #>> '{profile,cores}')::integer             AS cores,
       n.isa,
       n.memory_limit_bytes,
       n.descriptor ->> 'memory_limit_source'                    AS memory_limit_source,
       n.descriptor #>> '{profile,kernel}'                       AS kernel,
       n.descriptor #> '{profile,contracts}'                     AS contracts,
       n.descriptor #> '{profile,confinement}'                   AS confinement,
       n.descriptor #> '{profile,libraries}'                     AS libraries,
       (SELECT max(m.copy_bytes_s) FROM node_memory m WHERE m.node = n.node) AS bandwidth_bytes_s,
       (n.descriptor #>> '{profile,measured,at}')::timestamptz   AS measured_at,
       n.descriptor #>> '{profile,measured,machine}'             AS machine
FROM nodes n;

-- How each place of each node stands with each contract. A device that has lost a contract has lost it
-- alone. A place without a proof has a row that says so. A proof from before a release does not count
-- again.
CREATE OR REPLACE VIEW node_trust AS
WITH places AS (
    SELECT node, substrate, contract FROM node_proofs
    UNION
    SELECT n.node, s.value ->> 'id', c.contract
    FROM nodes n
    CROSS JOIN LATERAL jsonb_array_elements(coalesce(n.descriptor -> 'substrates', '[]')) s
    CROSS JOIN (VALUES ('bitwise'), ('bounded')) c (contract)
)
SELECT t.node,
       t.substrate,
       t.contract,
       CASE
           WHEN q.what = 'quarantined' THEN 'quarantined'
           WHEN p.seq IS NULL THEN 'unproved'
           WHEN p.refused IS NOT NULL THEN 'refused'
           WHEN r.at > p.proved_at THEN 'outdated'
           WHEN NOT p.passed THEN 'failed'
           WHEN p.expires_at < now() THEN 'expired'
           ELSE 'proved'
       END                                              AS standing,
       CASE
           WHEN q.what = 'quarantined' THEN q.detail
           WHEN p.refused IS NOT NULL THEN p.refused
           WHEN r.at > p.proved_at THEN 'it was released since: ' || r.detail
           ELSE nullif(p.detail, '')
       END                                              AS why,
       p.proved_at,
       p.expires_at,
       p.suite,
       p.ran_on,
       encode(p.environment, 'hex')                     AS environment,
       -- Of a quarantined place: 'node' if all of the node is, else the place.
       CASE WHEN q.what = 'quarantined' THEN q.place END AS lost_with
FROM places t
LEFT JOIN LATERAL (
    SELECT * FROM node_proofs p
    WHERE p.node = t.node AND p.substrate = t.substrate AND p.contract = t.contract
    ORDER BY p.judged_at DESC, p.seq DESC LIMIT 1
) p ON true
LEFT JOIN LATERAL (
    SELECT e.at, e.detail FROM node_events e
    WHERE e.node = t.node AND e.what = 'released'
    ORDER BY e.seq DESC LIMIT 1
) r ON true
LEFT JOIN LATERAL (
    SELECT e.what, e.detail,
           coalesce(e.substrate, 'node') AS place
    FROM node_events e
    WHERE e.node = t.node
      AND (e.what = 'released'
           OR (e.what = 'quarantined'
               AND e.contract = t.contract
               AND (e.substrate IS NULL OR e.substrate = t.substrate)))
    ORDER BY e.seq DESC LIMIT 1
) q ON true;

-- Each envelope in force: what a node may offer of a signal.
CREATE OR REPLACE VIEW node_envelopes AS
SELECT n.node,
       e.value ->> 'signal'                             AS signal,
       e.value ->> 'device'                             AS device,
       e.value -> 'shape'                               AS shape,
       (e.value ->> 'since')::timestamptz               AS since,
       coalesce((e.value ->> 'speed')::double precision, 1) AS speed,
       n.envelopes ->> 'who'                            AS set_by,
       (n.envelopes ->> 'at')::timestamptz              AS set_at
FROM nodes n
CROSS JOIN LATERAL jsonb_array_elements(n.envelopes -> 'envelopes') e;

-- Each node's clock against the broker's, the worst first.
CREATE OR REPLACE VIEW node_clocks AS
SELECT n.node,
       fiec_ms(n.clock_ahead_us)                        AS ahead_ms,
       fiec_ms(n.clock_within_us)                       AS within_ms,
       abs(n.clock_ahead_us) > n.clock_within_us + 100000 AS far,
       n.last_seen_at                                   AS measured_at,
       n.status
FROM nodes n
WHERE n.clock_ahead_us IS NOT NULL
ORDER BY abs(n.clock_ahead_us) DESC, n.node;

-- The energy of each node's executions, by the day (UTC) on which they were bound to it.
CREATE OR REPLACE VIEW energy_by_node AS
SELECT p.node,
       (p.bound_at AT TIME ZONE 'UTC')::date            AS day,
       count(*)                                         AS placements,
       count(*) FILTER (WHERE p.host_uj IS NOT NULL OR p.device_uj IS NOT NULL) AS measured,
       fiec_joules(sum(p.host_uj)::bigint)              AS host_joules,
       fiec_joules(sum(p.device_uj)::bigint)            AS device_joules,
       sum(coalesce(p.ended_at, now()) - p.started_at)  AS held
FROM placements p
GROUP BY p.node, day;
