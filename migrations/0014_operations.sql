-- Who changed what tenants may use at once; and why everything that waits does so, however long
-- the queue is.

-- Every change of a tenant's quota, as it was after it; null where there is no limit.
CREATE TABLE quota_changes (
    seq          bigint PRIMARY KEY,          -- in FIEC_RECORD
    tenant       text NOT NULL,
    at           timestamptz NOT NULL,
    who          text NOT NULL,
    running      bigint,                      -- executions at once
    devices      bigint,                      -- of them on devices
    memory_bytes bigint,                      -- of hosts, asked for together
    weight       integer                      -- relative to others; null: 1
);
CREATE INDEX quota_changes_tenant ON quota_changes (tenant, seq);

-- A quota for people.
CREATE FUNCTION fiec_quota_in_words(running bigint, devices bigint, memory_bytes bigint, weight integer)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(nullif(concat_ws(', ', $1 || ' running', $2 || ' on devices',
                                     $3 || ' bytes of memory', 'weight ' || $4), ''), 'no limits')
$$;

-- Every change with what was in force before it, and until when it held (null: it holds).
CREATE VIEW quota_history AS
SELECT c.tenant,
       c.at,
       lead(c.at) OVER w                                AS until,
       c.who,
       coalesce(lag(fiec_quota_in_words(c.running, c.devices, c.memory_bytes, c.weight)) OVER w,
                'no limits')                            AS before,
       fiec_quota_in_words(c.running, c.devices, c.memory_bytes, c.weight) AS after,
       c.running,
       c.devices,
       c.memory_bytes,
       coalesce(c.weight, 1)                            AS weight
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
       substring(r.cause_detail FROM '^asked for by (.*)$'),
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

-- What decides where an execution may be placed: of two with the same, one waits for what the other
-- waits for. A batch counts where it limits how many run, or what starts together.
CREATE FUNCTION fiec_wants(spec jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT spec - '{id,params,labels,priority,deadline,expected_s,commit,retries,array,after,verify,when_unviable,reallocation}'::text[]
                - CASE WHEN spec ?| '{at_once,gang}'::text[] THEN '' ELSE 'batch' END
$$;

-- True of an execution that somebody, or its own program, has changed since it was submitted.
CREATE FUNCTION fiec_adjusted(execution uuid) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT EXISTS (
        SELECT FROM execution_events v
        WHERE v.execution = $1 AND v.kind = 'adjusted'
          AND v.at >= (SELECT e.submitted_at FROM executions e WHERE e.id = $1) - interval '1 hour')
$$;

-- What was told last of those that wait, one row for all that want the same.
CREATE VIEW waiting_alike AS
SELECT DISTINCT ON (o.tenant, fiec_wants(o.spec))
       o.tenant,
       fiec_wants(o.spec)                               AS wants,
       o.id                                             AS execution,
       coalesce(o.client_id, o.id::text)                AS name,
       regexp_replace(t.summary, '^pending for \d+ ms: ', '') AS summary,
       t.at,
       t.candidates,
       t.omitted,
       t.would_help
FROM waiting_verdicts t
JOIN executions o ON o.id = t.execution
WHERE o.finished_at IS NULL AND o.phase = 'pending' AND o.spec IS NOT NULL AND NOT o.spec ? 'after'
  AND t.at >= greatest(o.submitted_at, o.bound_at, o.yielded_at)
  AND NOT fiec_adjusted(o.id)
ORDER BY o.tenant, fiec_wants(o.spec), t.at DESC;

-- What must have ended before this one, and has not; null where there is nothing.
CREATE FUNCTION fiec_awaits(execution uuid) RETURNS text
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

-- Why an execution is where it is, or is not: what `fiec why` says, as far as it was recorded. Of
-- one that is placed: the cause of its last binding, the evidence, and whom its place was chosen
-- from. Of one that waits: why it must be bound anew, and who was considered in vain, as it was told
-- of it, or of another one that wants the same.
CREATE OR REPLACE FUNCTION why(execution uuid)
RETURNS TABLE (
    phase          text,
    node           text,                      -- where it is; null where it is nowhere
    substrate      text,
    epoch          bigint,
    from_node      text,                      -- where it came from
    cause          text,                      -- initial, pressure, operator, …
    cause_in_words text,
    evidence       jsonb,                     -- {node, signal, device, value, threshold, since, vector}
    at             timestamptz,               -- of the binding, or of the last look at what waits
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
          AND v.kind IN ('yielded', 'refused', 'paused', 'resumed', 'stepped_back')
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

-- The same as before, with what is known of those of which nothing was told.
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
       fiec_candidates_in_words(d.candidates, d.omitted) AS last_candidates,
       d.at                                             AS last_decided_at,
       known.words                                      AS nodes_known,
       fiec_candidates_in_words(coalesce(w.candidates, alike.candidates),
                                coalesce(w.omitted, alike.omitted)) AS rejected,
       (SELECT string_agg(h, E'\n')
        FROM jsonb_array_elements_text(coalesce(w.would_help, alike.would_help)) h) AS would_help,
       coalesce(w.at, alike.at)                         AS told_at
FROM executions e
LEFT JOIN nodes n ON n.node = e.node
LEFT JOIN LATERAL (
    SELECT d.candidates, d.omitted, d.at
    FROM decisions d
    -- The bound on time lets whole days of partitions be passed over.
    WHERE d.execution = e.id AND d.at >= e.submitted_at - interval '1 hour'
    ORDER BY d.ordinal DESC LIMIT 1
) d ON true
LEFT JOIN LATERAL (
    SELECT v.kind, v.detail, v.at
    FROM execution_events v
    WHERE v.execution = e.id AND v.at >= e.submitted_at - interval '1 hour'
      AND v.kind IN ('yielded', 'refused', 'resumed')
    ORDER BY v.ordinal DESC LIMIT 1
) ev ON true
LEFT JOIN LATERAL fiec_waits(e.id, greatest(e.submitted_at, e.bound_at, e.yielded_at, ev.at)) w
    ON e.phase = 'pending'
LEFT JOIN LATERAL (SELECT fiec_awaits(e.id) AS words) awaits
    ON e.phase = 'pending' AND w.execution IS NULL AND e.spec ? 'after'
LEFT JOIN waiting_alike alike
    ON e.phase = 'pending' AND w.execution IS NULL AND awaits.words IS NULL
   AND alike.tenant = e.tenant AND alike.wants = fiec_wants(e.spec) AND NOT fiec_adjusted(e.id)
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
