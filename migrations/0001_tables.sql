-- The projection of the ledger. One recorder writes, people read.
--
-- Conventions: times are timestamptz (UTC). `*_us` are microseconds, `*_bytes` bytes. Digests are
-- BLAKE3-256 as bytea (`encode(digest, 'hex')`). Hot tables have no foreign keys and few indexes:
-- an execution of one capsule costs one row in executions, placements and decisions each.
-- What grows with the number of boundaries is partitioned by day (see 0002).

CREATE TABLE batches (
    id            uuid PRIMARY KEY,
    tenant        text NOT NULL,
    name          text,                       -- as the client named it, if it did
    first_seen_at timestamptz NOT NULL        -- when the broker stored its first execution
);

CREATE TABLE executions (
    id                  uuid PRIMARY KEY,
    tenant              text NOT NULL,
    client_id           text,                 -- the client's own id, if it gave one
    batch_id            uuid,
    batch_line          integer,
    program             text,                 -- name@version; null while only a large submission in FIEC_DATA says it
    contract            text NOT NULL,        -- bitwise, bounded, statistical
    submission          bytea NOT NULL,       -- digest of the canonical submission
    spec                jsonb,                -- the submission, where the ledger carried it
    submitted_at        timestamptz NOT NULL,
    phase               text NOT NULL,        -- pending, bound, started, paused, completed, failed, cancelled
    node                text,                 -- of the last binding, also after its end
    substrate           text,
    epoch               bigint NOT NULL,
    bound_at            timestamptz,          -- when it was last bound
    first_started_at    timestamptz,
    yielded_at          timestamptz,          -- when it last left a node on order
    computed_until      timestamptz,          -- end of the last capsule known to have ended
    boundary_index      bigint NOT NULL,      -- last committed boundary; 0 = none
    boundary_of         bigint,               -- boundaries in all, where the program knows
    progress_note       text,
    state_digest        bytea,                -- of the last committed state
    last_state_bytes    bigint,
    state_seq           bigint,               -- ledger sequence that carries it; null = object store
    state_ordinal       bigint,
    commits             bigint NOT NULL,
    state_bytes         bigint NOT NULL,      -- bytes of state committed over its life
    rebindings          bigint NOT NULL,
    pressure_rebindings bigint NOT NULL,
    crashes             bigint NOT NULL,
    compute_us          bigint NOT NULL,      -- time spent computing, as committed
    finished_at         timestamptz,
    capsules            bigint,               -- in all, once completed
    result              jsonb,
    outputs             jsonb,                -- that became visible with completion, not with a boundary
    failure             text,
    stderr_tail         text,                 -- of the last crash or the failure
    requested           text,                 -- an order taken but not yet carried out, with who gave it
    paused_by           text,
    ordinal             bigint NOT NULL,      -- of the last ledger message recorded here
    seq                 bigint NOT NULL,      -- its sequence in FIEC_LEDGER
    author              text NOT NULL,        -- who wrote it
    recorded_at         timestamptz NOT NULL  -- when the broker stored it
) WITH (fillfactor = 85);

-- Live executions. Finished ones leave the index, and a row that arrives finished never enters it.
CREATE INDEX executions_live ON executions (submitted_at) WHERE finished_at IS NULL;
CREATE INDEX executions_client ON executions (client_id) WHERE client_id IS NOT NULL;
CREATE INDEX executions_batch ON executions (batch_id, batch_line) WHERE batch_id IS NOT NULL;
CREATE INDEX executions_failed ON executions (finished_at) WHERE phase = 'failed';
-- Block ranges cost next to nothing to keep, since rows arrive in the order of time.
CREATE INDEX executions_time ON executions USING brin (submitted_at, finished_at)
    WITH (pages_per_range = 32, autosummarize = on);

CREATE TABLE placements (
    execution       uuid NOT NULL,
    epoch           bigint NOT NULL,
    node            text,                     -- null only where the binding itself was never seen
    instance        uuid,
    substrate       text,
    cause           text,                     -- initial, pressure, operator, drain, lost, not_taken, resumed, balance
    bound_at        timestamptz,
    started_at      timestamptz,
    computing_since timestamptz,              -- its first capsule here began
    computed_until  timestamptz,              -- its last capsule here ended
    ended_at        timestamptz,
    end_reason      text,                     -- a cause, or completed, failed, cancelled, paused, refused, unseen
    gap_us          bigint,                   -- from the last capsule before this placement to its first here;
                                              -- by two nodes' clocks, so small ones may be negative
    PRIMARY KEY (execution, epoch)
) WITH (fillfactor = 90);
CREATE INDEX placements_time ON placements USING brin (bound_at)
    WITH (pages_per_range = 32, autosummarize = on);

CREATE TABLE rebindings (
    execution    uuid NOT NULL,
    epoch        bigint NOT NULL,             -- the new one
    at           timestamptz NOT NULL,        -- when it was bound anew
    from_node    text,
    to_node      text NOT NULL,
    cause        text NOT NULL,
    cause_detail text NOT NULL,               -- one sentence
    signal       text,                        -- from here to vector: the pressure, if that was the cause
    device       text,
    value        double precision,
    high         double precision,
    low          double precision,
    dwell_ms     integer,
    since        timestamptz,                 -- since when the signal was at or above high
    vector       jsonb,                       -- the readings at the decision
    state_index  bigint,                      -- boundary from which it goes on; null = from the beginning
    state_digest bytea,
    state_bytes  bigint,
    yielded_at   timestamptz,                 -- null where the node did not yield it
    gap_us       bigint,                      -- end of the last capsule there to start of the first here
    PRIMARY KEY (execution, epoch)
);
CREATE INDEX rebindings_at ON rebindings (at);

CREATE TABLE boundaries (
    execution    uuid NOT NULL,
    index        bigint NOT NULL,
    epoch        bigint NOT NULL,
    node         text,
    digest       bytea NOT NULL,
    bytes        bigint NOT NULL,
    computed_at  timestamptz NOT NULL,        -- the capsule before it ended, by the node's clock
    committed_at timestamptz NOT NULL,        -- the broker stored it
    compute_us   bigint NOT NULL,             -- since the commit before
    seq          bigint NOT NULL,
    ordinal      bigint NOT NULL,
    note         text,
    outputs      jsonb                        -- that became visible with it
) PARTITION BY RANGE (committed_at);
CREATE INDEX boundaries_execution ON boundaries (execution, index);

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
    kind      text NOT NULL,                  -- yielded, refused, paused, resumed, requested, crashed, completed, failed, cancelled
    epoch     bigint NOT NULL,
    node      text,
    who       text,
    detail    text NOT NULL                   -- one sentence
) PARTITION BY RANGE (at);
CREATE INDEX execution_events_execution ON execution_events (execution, ordinal);

-- The last committed state itself, so that the broker's loss is not the computation's.
CREATE TABLE boundary_state (
    execution  uuid PRIMARY KEY,
    index      bigint NOT NULL,
    digest     bytea NOT NULL,
    bytes      bigint NOT NULL,
    state      bytea,                         -- null: over the configured size, only its digest is kept
    stored_at  timestamptz NOT NULL DEFAULT now()
);
-- Floating-point state does not compress; do not try.
ALTER TABLE boundary_state ALTER COLUMN state SET STORAGE EXTERNAL;

CREATE TABLE hardware_vectors (
    node         text NOT NULL,
    at           timestamptz NOT NULL,
    instance     uuid NOT NULL,
    memory       real,                        -- each the worst of the node and its devices, in [0, 1];
    memory_stall real,                        -- null = not measured
    power        real,
    thermal      real,
    latency      real,
    contention   real,
    fabric       real,
    errors       real,
    draining     boolean NOT NULL,
    slots        integer NOT NULL,
    running      integer NOT NULL,
    queued       integer NOT NULL,
    readings     jsonb NOT NULL,              -- all of them, with device, raw value, limit, unit, source
    PRIMARY KEY (node, at)
) PARTITION BY RANGE (at);

CREATE TABLE nodes (
    node               text PRIMARY KEY,
    instance           uuid,
    host               text,
    version            text,
    joined_at          timestamptz,
    last_seen_at       timestamptz,
    status             text NOT NULL DEFAULT 'unknown',  -- up, left, lost, unknown
    status_detail      text,
    status_at          timestamptz,
    cordoned           boolean NOT NULL DEFAULT false,
    draining           boolean NOT NULL DEFAULT false,
    viability          text,
    shard              integer,
    slots              integer,
    running            integer,
    queued             integer,
    cpus               integer,
    isa                text,
    memory_limit_bytes bigint,
    programs           text[],
    labels             jsonb,
    thresholds         jsonb,
    descriptor         jsonb
) WITH (fillfactor = 70);

CREATE TABLE node_events (
    seq      bigint PRIMARY KEY,              -- in FIEC_RECORD
    node     text NOT NULL,
    instance uuid,
    what     text NOT NULL,
    detail   text NOT NULL,
    at       timestamptz NOT NULL
);
CREATE INDEX node_events_node ON node_events (node, at);

CREATE TABLE rejections (
    seq            bigint PRIMARY KEY,        -- in FIEC_RECORD
    tenant         text NOT NULL,
    submission_seq bigint,                    -- in FIEC_SUBMIT
    line           integer NOT NULL,
    field          text NOT NULL,
    reason         text NOT NULL,
    excerpt        text NOT NULL,
    at             timestamptz NOT NULL
);
CREATE INDEX rejections_at ON rejections (at);

-- Ledger messages that were never seen: dropped by the broker's limit before they were recorded,
-- or unreadable.
CREATE TABLE ledger_gaps (
    execution     uuid NOT NULL,
    first_missing bigint NOT NULL,            -- ordinals
    last_missing  bigint NOT NULL,
    seq           bigint NOT NULL,            -- of the first message after the gap
    reason        text NOT NULL,
    at            timestamptz NOT NULL,
    PRIMARY KEY (execution, first_missing)
);

CREATE TABLE recorder_checkpoint (
    stream     text PRIMARY KEY,
    seq        bigint NOT NULL,               -- last sequence that is in these tables
    updated_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 10);                     -- one row, updated with every batch: leave it room
INSERT INTO recorder_checkpoint (stream, seq) VALUES ('FIEC_LEDGER', 0), ('FIEC_RECORD', 0);
