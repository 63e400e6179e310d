-- Views for people. Durations come as intervals and, where they are short, in milliseconds.

-- Microseconds as milliseconds with three digits.
CREATE FUNCTION fiec_ms(us bigint) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT round(us / 1000.0, 3) $$;

-- Microseconds as an interval.
CREATE FUNCTION fiec_interval(us bigint) RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT us * interval '1 microsecond' $$;

-- A decision's candidates, one sentence each.
CREATE FUNCTION fiec_candidates_in_words(candidates jsonb, omitted integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT string_agg(
               (c.value ->> 'node') || ': ' ||
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

CREATE VIEW execution_summary AS
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
       coalesce(e.finished_at, now()) - e.first_started_at AS ran,
       fiec_interval(e.compute_us)                      AS computed,
       e.rebindings,
       e.pressure_rebindings,
       e.crashes,
       e.commits,
       e.state_bytes,
       e.last_state_bytes,
       encode(e.state_digest, 'hex')                    AS state_digest,
       e.contract,
       e.spec -> 'labels'                               AS labels,
       e.batch_id                                       AS batch,
       e.batch_line,
       e.requested,
       e.result,
       e.failure,
       e.stderr_tail
FROM executions e;

CREATE VIEW placement_timeline AS
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
       p.instance
FROM placements p
JOIN executions e ON e.id = p.execution;

CREATE VIEW rebinding_history AS
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

-- Executions that wait: why, and what was said of each node when a node was last chosen for them.
-- What holds at this moment is known to the policy service only: `fiec why ID`.
CREATE VIEW why_pending AS
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
           WHEN ev.kind IS NOT NULL THEN 'waits for a node since it was ' || ev.kind || ': ' || ev.detail
           WHEN e.epoch = 0 THEN 'has never been bound: no node was acceptable when it was last looked at, '
                                 || 'or it was not looked at yet'
           ELSE 'waits for a node'
       END                                              AS why,
       fiec_candidates_in_words(d.candidates, d.omitted) AS last_candidates,
       d.at                                             AS last_decided_at,
       known.words                                      AS nodes_known
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
