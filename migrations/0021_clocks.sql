-- One clock: the broker's. It stamps each message that it stores. Workers and policy services measure it
-- and write their own times by it, so a duration is a difference of one clock's times, whichever nodes it
-- spans. A row that an earlier version wrote has the times of its author's machine.

ALTER TABLE nodes
    ADD COLUMN clock_ahead_us  bigint,        -- the node's clock less the broker's; null: not measured
    ADD COLUMN clock_within_us bigint;        -- bound of that measurement's error

-- Each node's clock against the broker's, the worst first.
CREATE VIEW node_clocks AS
SELECT n.node,
       fiec_ms(n.clock_ahead_us)                        AS ahead_ms,
       fiec_ms(n.clock_within_us)                       AS within_ms,
       abs(n.clock_ahead_us) > n.clock_within_us + 100000 AS far,
       n.last_seen_at                                   AS measured_at,
       n.status
FROM nodes n
WHERE n.clock_ahead_us IS NOT NULL
ORDER BY abs(n.clock_ahead_us) DESC, n.node;

COMMENT ON COLUMN executions.submitted_at IS 'broker''s clock: when it stored the submission, or a policy service took the request';
COMMENT ON COLUMN executions.bound_at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN executions.first_started_at IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN executions.yielded_at IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN executions.computed_until IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN executions.finished_at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN executions.recorded_at IS 'broker''s clock: when it stored the message';
COMMENT ON COLUMN executions.compute_us IS 'sum of durations by the monotonic clocks of the nodes that computed';
COMMENT ON COLUMN placements.bound_at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN placements.started_at IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN placements.computing_since IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN placements.computed_until IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN placements.ended_at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN placements.gap_us IS 'from the last capsule before this placement to its first here, both by the broker''s clock; each end is off by nodes.clock_within_us at most, so a small gap may be negative';
COMMENT ON COLUMN rebindings.at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN rebindings.since IS 'broker''s clock, as the policy service measured it';
COMMENT ON COLUMN rebindings.gap_us IS 'as placements.gap_us';
COMMENT ON COLUMN boundaries.computed_at IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN boundaries.committed_at IS 'broker''s clock: when it stored the message';
COMMENT ON COLUMN boundaries.compute_us IS 'since the commit before, by the node''s monotonic clock';
COMMENT ON COLUMN hardware_vectors.at IS 'broker''s clock, as the node measured it';
COMMENT ON VIEW placement_timeline IS 'waited, held, gap_ms: by the broker''s clock; of a placement that has not ended, held ends by PostgreSQL''s clock';
COMMENT ON VIEW execution_summary IS 'waited, age, ran: by the broker''s clock; of an execution that has not ended, age and ran end by PostgreSQL''s clock';
