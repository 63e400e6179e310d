-- Executions: the tables that the recorder writes from the ledgers. People read them by the views of
-- views.sql.
--
-- Conventions:
-- - Times are timestamptz. They are by the broker's clock, if a comment does not say otherwise: the
--   broker stamps each message that it stores, and workers and policy services measure that clock.
-- - `*_us` are microseconds, `*_bytes` bytes, `*_uj` microjoules. Null is "not measured", never zero.
-- - Digests are BLAKE3-256 as bytea: encode(digest, 'hex').
-- - Tables with many new rows have no foreign keys and few indexes. An execution of one capsule costs
--   one row in executions, placements and decisions each.
-- - Tables that grow with the number of boundaries have one partition a day (see 0003).
-- - Columns have the order of the declarations in services/recorder; a test compares both.

CREATE TABLE batches (
    id            uuid PRIMARY KEY,
    tenant        text NOT NULL,
    name          text,                       -- the client's name for it, if it gave one
    first_seen_at timestamptz NOT NULL        -- the broker stored its first execution
);

CREATE TABLE executions (
    id                  uuid PRIMARY KEY,
    tenant              text NOT NULL,
    client_id           text,                 -- the client's own id, if it gave one
    batch_id            uuid,
    batch_line          integer,
    program             text,                 -- name@version; null as long as spec is
    contract            text NOT NULL,        -- bitwise, bounded, statistical
    submission          bytea NOT NULL,       -- digest of the canonical submission
    spec                jsonb,
    submitted_at        timestamptz NOT NULL,
    phase               text NOT NULL,        -- pending, bound, started, paused, verifying, completed, failed, cancelled, returned
    node                text,                 -- of the last binding, also after its end
    substrate           text,
    epoch               bigint NOT NULL,
    bound_at            timestamptz,          -- of the last binding
    first_started_at    timestamptz,
    yielded_at          timestamptz,          -- it last left a node on order
    computed_until      timestamptz,          -- end of the last capsule that is known to have ended
    boundary_index      bigint NOT NULL,      -- last committed boundary; 0: none
    boundary_of         bigint,               -- boundaries in all, if the program knows
    progress_note       text,
    state_digest        bytea,                -- of the last committed state
    last_state_bytes    bigint,
    state_seq           bigint,               -- ledger sequence that carries it; null: object store
    state_ordinal       bigint,
    commits             bigint NOT NULL,
    state_bytes         bigint NOT NULL,      -- bytes of state committed over its life
    rebindings          bigint NOT NULL,
    pressure_rebindings bigint NOT NULL,
    crashes             bigint NOT NULL,
    compute_us          bigint NOT NULL,
    finished_at         timestamptz,
    capsules            bigint,               -- in all, once completed
    result              jsonb,
    outputs             jsonb,                -- outputs that became visible with completion, not with a boundary
    failure             text,
    stderr_tail         text,                 -- of the last crash or the failure
    requested           text,                 -- a request that is not yet carried out: cancel or pause
    requested_by        text,                 -- who asked for it
    paused_by           text,
    ordinal             bigint NOT NULL,      -- of the last ledger message recorded here
    seq                 bigint NOT NULL,      -- its sequence in FIEC_LEDGER
    author              text NOT NULL,
    recorded_at         timestamptz NOT NULL,
    -- A counter's increase goes to the executions that computed on its node meanwhile, in equal parts
    -- by time. `host_*` is a share of processors and memory, `device_*` of the execution's device.
    -- Several workers on one host each take the host's counters for their own.
    host_uj             bigint,
    host_intervals      bigint,               -- between commits that host_uj is the sum of
    device_uj           bigint,
    device_intervals    bigint,
    digest              bytea                 -- of the last message's header: the next message names it
) WITH (fillfactor = 85);

-- Live executions. A finished one leaves the index, and a row that arrives finished never enters it.
CREATE INDEX executions_live ON executions (submitted_at) WHERE finished_at IS NULL;
CREATE INDEX executions_client ON executions (client_id) WHERE client_id IS NOT NULL;
CREATE INDEX executions_batch ON executions (batch_id, batch_line) WHERE batch_id IS NOT NULL;
CREATE INDEX executions_failed ON executions (finished_at) WHERE phase = 'failed';
-- The queue of submissions over 2 KiB that are still to be copied to spec.
CREATE INDEX executions_large ON executions (submitted_at, id) WHERE spec IS NULL AND finished_at IS NULL;
CREATE INDEX executions_outputs ON executions (id) WHERE outputs IS NOT NULL;
-- Block ranges cost next to nothing to keep, since rows arrive in the order of time.
CREATE INDEX executions_time ON executions USING brin (submitted_at, finished_at)
    WITH (pages_per_range = 32, autosummarize = on);

COMMENT ON COLUMN executions.spec IS
    'The submission; null where it is over 2 KiB and not copied yet, or its execution ended before that';
COMMENT ON COLUMN executions.submitted_at IS 'broker''s clock: when it stored the submission, or a policy service took the request';
COMMENT ON COLUMN executions.bound_at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN executions.first_started_at IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN executions.yielded_at IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN executions.computed_until IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN executions.finished_at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN executions.recorded_at IS 'broker''s clock: when it stored the message';
COMMENT ON COLUMN executions.compute_us IS 'sum of durations by the monotonic clocks of the nodes that computed';

CREATE TABLE placements (
    execution       uuid NOT NULL,
    epoch           bigint NOT NULL,
    node            text,                     -- null only if the binding itself was never seen
    instance        uuid,
    substrate       text,
    cause           text,                     -- initial, pressure, operator, drain, lost, not_taken, resumed, balance, …
    bound_at        timestamptz,
    started_at      timestamptz,
    computing_since timestamptz,              -- its first capsule here began
    computed_until  timestamptz,              -- its last capsule here ended
    ended_at        timestamptz,
    end_reason      text,                     -- a cause, or completed, failed, cancelled, paused, refused, unseen, …
    gap_us          bigint,
    host_uj         bigint,                   -- of the intervals that ended here
    device_uj       bigint,
    PRIMARY KEY (execution, epoch)
) WITH (fillfactor = 90);
CREATE INDEX placements_time ON placements USING brin (bound_at)
    WITH (pages_per_range = 32, autosummarize = on);

COMMENT ON COLUMN placements.bound_at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN placements.started_at IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN placements.computing_since IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN placements.computed_until IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN placements.ended_at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN placements.gap_us IS 'from the last capsule before this placement to its first here, both by the broker''s clock; each end is off by nodes.clock_within_us at most, so a small gap may be negative';

CREATE TABLE rebindings (
    execution    uuid NOT NULL,
    epoch        bigint NOT NULL,             -- the new one
    at           timestamptz NOT NULL,        -- it was bound anew
    from_node    text,
    to_node      text NOT NULL,
    cause        text NOT NULL,
    cause_detail text NOT NULL,               -- one sentence
    who          text,                        -- asked for it; null: nobody did
    signal       text,                        -- from here to vector: the pressure, if that was the cause
    device       text,
    value        double precision,
    high         double precision,
    low          double precision,
    dwell_ms     integer,
    since        timestamptz,                 -- the signal has been at or above high since then
    vector       jsonb,                       -- the readings at the decision
    state_index  bigint,                      -- boundary from which it goes on; null: from the beginning
    state_digest bytea,
    state_bytes  bigint,
    yielded_at   timestamptz,                 -- null if the node did not yield it
    gap_us       bigint,
    PRIMARY KEY (execution, epoch)
);
CREATE INDEX rebindings_at ON rebindings (at);

COMMENT ON COLUMN rebindings.at IS 'broker''s clock, as its author measured it';
COMMENT ON COLUMN rebindings.since IS 'broker''s clock, as the policy service measured it';
COMMENT ON COLUMN rebindings.gap_us IS 'as placements.gap_us';

CREATE TABLE boundaries (
    execution    uuid NOT NULL,
    index        bigint NOT NULL,
    epoch        bigint NOT NULL,
    node         text,
    digest       bytea NOT NULL,
    bytes        bigint NOT NULL,
    computed_at  timestamptz NOT NULL,        -- the capsule before it ended
    committed_at timestamptz NOT NULL,
    compute_us   bigint NOT NULL,
    seq          bigint NOT NULL,
    ordinal      bigint NOT NULL,
    note         text,
    outputs      jsonb,                       -- outputs that became visible with it
    host_uj      bigint,                      -- since the commit before
    device_uj    bigint,
    withdrawn_at timestamptz                  -- the execution went back behind it: it does not count
) PARTITION BY RANGE (committed_at);
CREATE INDEX boundaries_execution ON boundaries (execution, index);
CREATE INDEX boundaries_outputs ON boundaries (committed_at) WHERE outputs IS NOT NULL;

COMMENT ON COLUMN boundaries.computed_at IS 'broker''s clock, as the worker measured it';
COMMENT ON COLUMN boundaries.committed_at IS 'broker''s clock: when it stored the message';
COMMENT ON COLUMN boundaries.compute_us IS 'since the commit before, by the node''s monotonic clock';

CREATE TABLE decisions (
    execution  uuid NOT NULL,
    epoch      bigint NOT NULL,
    ordinal    bigint NOT NULL,
    at         timestamptz NOT NULL,          -- the broker stored it
    cause      text NOT NULL,
    chosen     text NOT NULL,
    candidates jsonb NOT NULL,                -- [{node, score | rejected: [reason]}], the chosen one first
    omitted    integer NOT NULL               -- candidates beyond those
) PARTITION BY RANGE (at);
CREATE INDEX decisions_execution ON decisions (execution, ordinal);

CREATE TABLE execution_events (
    execution uuid NOT NULL,
    ordinal   bigint NOT NULL,
    at        timestamptz NOT NULL,           -- the broker stored it
    kind      text NOT NULL,                  -- yielded, refused, paused, resumed, requested, crashed, parked, …
    cause     text,                           -- of yielded, parked and stepped_back: as in placements
    epoch     bigint NOT NULL,
    node      text,
    who       text,                           -- asked for it; null: nobody did
    detail    text NOT NULL                   -- one sentence
) PARTITION BY RANGE (at);
CREATE INDEX execution_events_execution ON execution_events (execution, ordinal);
CREATE INDEX execution_events_adjusted ON execution_events (execution, ordinal) WHERE kind = 'adjusted';
CREATE INDEX execution_events_parked ON execution_events (at) WHERE kind = 'parked';

-- Changes of live executions (`fiec adjust`, `pin`, `exclude`, a program that asks for memory). The
-- event's own row in execution_events has the same as a sentence.
CREATE TABLE execution_changes (
    execution uuid NOT NULL,
    ordinal   bigint NOT NULL,                -- of its message
    nth       integer NOT NULL,               -- of the changes of that message, from 0
    at        timestamptz NOT NULL,           -- the broker stored it
    who       text NOT NULL,
    change    jsonb NOT NULL,                 -- {priority, deadline, viability, nodes, exclude,
                                              -- memory_bytes, device_memory_bytes}: an absent field stayed
    PRIMARY KEY (execution, ordinal, nth)
);

-- Parts of a range of tiles. Each part is an execution of its own, with its own rows everywhere.
CREATE TABLE spread_splits (
    part       uuid PRIMARY KEY,
    holder     uuid NOT NULL,                 -- has split it off
    nth        bigint,                        -- how often the holder was split before; null: not seen
    from_tile  bigint NOT NULL,
    to_tile    bigint NOT NULL,               -- the tile behind its last
    split_at   timestamptz,                   -- the broker stored it; null: not seen
    merged_at  timestamptz,                   -- its holder has taken it back
    dropped_at timestamptz                    -- `fiec repair` began its holder anew without it
);
CREATE INDEX spread_splits_holder ON spread_splits (holder);

-- Why each pending execution waits, as a policy service saw it. It reports an execution that has
-- waited for a second, and again when the reasons change; of a long queue only the first ones.
CREATE TABLE waiting_verdicts (
    execution  uuid PRIMARY KEY,
    at         timestamptz NOT NULL,
    summary    text NOT NULL,                 -- one sentence
    candidates jsonb NOT NULL,                -- [{node, score | rejected: [reason]}]
    omitted    integer NOT NULL,              -- candidates beyond those
    would_help jsonb NOT NULL                 -- [sentence]
) WITH (fillfactor = 70);

-- The last committed state itself, so that a loss of the broker's store loses no computation.
CREATE TABLE boundary_state (
    execution  uuid PRIMARY KEY,
    index      bigint NOT NULL,
    digest     bytea NOT NULL,
    bytes      bigint NOT NULL,
    state      bytea,                         -- null: over the configured size, only its digest is kept
    stored_at  timestamptz NOT NULL DEFAULT now()
);
-- Floating-point state does not compress.
ALTER TABLE boundary_state ALTER COLUMN state SET STORAGE EXTERNAL;

-- Results over 4 KiB, which their ledger messages name by digest. The recorder copies each from
-- FIEC_DATA to executions.result, and then deletes its row here.
CREATE TABLE results_to_copy (
    execution uuid PRIMARY KEY,
    digest    bytea NOT NULL,                 -- of the JSON
    bytes     bigint NOT NULL,
    tried_at  timestamptz,                    -- the last try that failed
    failure   text
);
