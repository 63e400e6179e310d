-- What operators asked for, and why every execution is where it is or is not.

-- Who asked for what happened to a node; null where nobody did.
ALTER TABLE node_events ADD COLUMN who text;
UPDATE node_events SET who = substring(detail FROM 'asked for by (.*)$')
WHERE what IN ('cordoned', 'uncordoned', 'draining');
UPDATE node_events SET who = substring(detail FROM 'given back by (.*)$') WHERE what = 'released';
CREATE INDEX node_events_asked ON node_events (at) WHERE who IS NOT NULL;

-- Why each execution waits, or waited last, as a policy service saw it: told once it has waited for
-- a second, and again when the reasons change. Of the many that wait the first are told of.
CREATE TABLE waiting_verdicts (
    execution  uuid PRIMARY KEY,
    at         timestamptz NOT NULL,
    summary    text NOT NULL,                 -- one sentence
    candidates jsonb NOT NULL,                -- [{node, score | rejected: [reason]}]
    omitted    integer NOT NULL,              -- candidates beyond those
    would_help jsonb NOT NULL                 -- [sentence]
) WITH (fillfactor = 70);

-- What was told of an execution since it began to wait.
CREATE FUNCTION fiec_waits(of uuid, since timestamptz) RETURNS SETOF waiting_verdicts
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT * FROM waiting_verdicts w WHERE w.execution = $1 AND w.at >= $2
$$;

-- Who asked for what: of executions and of nodes.
CREATE VIEW operator_actions AS
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
WHERE n.who IS NOT NULL;

-- Why an execution is where it is, or is not: what `fiec why` says, as far as it was recorded. Of
-- one that is placed: the cause of its last binding, the evidence, and whom its place was chosen
-- from. Of one that waits: why it must be bound anew, and who was considered in vain.
CREATE FUNCTION why(execution uuid)
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
           coalesce(w.at, p.bound_at, e.submitted_at),
           CASE e.phase
               WHEN 'pending' THEN coalesce(w.summary, 'it waits; nothing was told of it yet')
               WHEN 'bound' THEN 'bound to ' || e.node || ' under epoch ' || e.epoch
               WHEN 'started' THEN 'computing on ' || e.node || ' under epoch ' || e.epoch
               WHEN 'paused' THEN 'paused by ' || coalesce(e.paused_by, 'somebody')
               WHEN 'failed' THEN 'failed: ' || coalesce(e.failure, '')
               ELSE e.phase
           END,
           CASE WHEN e.phase = 'pending' THEN w.candidates ELSE d.candidates END,
           CASE WHEN e.phase = 'pending' THEN w.omitted ELSE d.omitted END,
           coalesce(w.would_help, '[]')
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
    WHERE e.id = $1
$$;

-- The same as before, with what was told of what waits.
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
           WHEN ev.kind IS NOT NULL THEN 'waits for a node since it was ' || ev.kind || ': ' || ev.detail
           WHEN e.epoch = 0 THEN 'has never been bound: no node was acceptable when it was last looked at, '
                                 || 'or it was not looked at yet'
           ELSE 'waits for a node'
       END                                              AS why,
       fiec_candidates_in_words(d.candidates, d.omitted) AS last_candidates,
       d.at                                             AS last_decided_at,
       known.words                                      AS nodes_known,
       fiec_candidates_in_words(w.candidates, w.omitted) AS rejected,
       (SELECT string_agg(h, E'\n') FROM jsonb_array_elements_text(w.would_help) h) AS would_help,
       w.at                                             AS told_at
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
