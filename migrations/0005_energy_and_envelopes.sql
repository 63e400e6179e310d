-- Energy as counters gave it, in microjoules; null where it was not measured, which is not zero.
-- `host_*` is a share of processors and memory, `device_*` of the device that the execution was
-- bound to. A counter's increase goes to those that computed on its node meanwhile, in equal parts
-- by the time for which each did; while nothing computes, nobody is charged. Several workers on one
-- host each take the host's counters for their own.

ALTER TABLE executions
    ADD COLUMN host_uj          bigint,       -- over its life
    ADD COLUMN host_intervals   bigint,       -- between commits that this is the sum of
    ADD COLUMN device_uj        bigint,
    ADD COLUMN device_intervals bigint;

ALTER TABLE placements
    ADD COLUMN host_uj   bigint,              -- of the intervals that ended here
    ADD COLUMN device_uj bigint;

ALTER TABLE boundaries
    ADD COLUMN host_uj   bigint,              -- since the commit before
    ADD COLUMN device_uj bigint;

-- What a node may offer: all that was in force when it was set last, with who set it.
ALTER TABLE nodes ADD COLUMN envelopes jsonb;

-- Microjoules as joules.
CREATE FUNCTION fiec_joules(uj bigint) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT round(uj / 1e6, 6) $$;

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
       e.stderr_tail,
       fiec_joules(e.host_uj)                           AS host_joules,
       fiec_joules(e.device_uj)                         AS device_joules,
       -- Share of the intervals between commits in which it was measured.
       CASE WHEN e.host_uj IS NOT NULL OR e.device_uj IS NOT NULL THEN
           round(greatest(e.host_intervals, e.device_intervals)::numeric
                 / nullif(e.commits + (e.phase = 'completed')::integer, 0), 4)
       END                                              AS energy_coverage
FROM executions e;

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

-- What each node used for executions, by the day (UTC) on which they were bound to it.
CREATE VIEW energy_by_node AS
SELECT p.node,
       (p.bound_at AT TIME ZONE 'UTC')::date            AS day,
       count(*)                                         AS placements,
       count(*) FILTER (WHERE p.host_uj IS NOT NULL OR p.device_uj IS NOT NULL) AS measured,
       fiec_joules(sum(p.host_uj)::bigint)              AS host_joules,
       fiec_joules(sum(p.device_uj)::bigint)            AS device_joules,
       sum(coalesce(p.ended_at, now()) - p.started_at)  AS held
FROM placements p
GROUP BY p.node, day;

-- What each node may offer now, one row an envelope.
CREATE VIEW node_envelopes AS
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
