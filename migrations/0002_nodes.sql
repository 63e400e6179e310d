-- Nodes, tenants, and the recorder's own state: the tables that the recorder writes from records,
-- hardware vectors, and its own work. See 0001 for the conventions.

CREATE TABLE hardware_vectors (
    node         text NOT NULL,
    at           timestamptz NOT NULL,
    instance     uuid NOT NULL,
    memory       real,                        -- each signal: the worst of the node and its devices, in [0, 1]
    memory_stall real,
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

COMMENT ON COLUMN hardware_vectors.at IS 'broker''s clock, as the node measured it';

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
    viability          text,                  -- for people: viable, unviable or unknown, then why
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
    descriptor         jsonb,
    envelopes          jsonb,                 -- all that are in force, and who set them
    clock_ahead_us     bigint,                -- the node's clock less the broker's
    clock_within_us    bigint                 -- bound of that measurement's error
) WITH (fillfactor = 70);

CREATE TABLE node_events (
    seq       bigint PRIMARY KEY,             -- in FIEC_RECORD
    node      text NOT NULL,
    instance  uuid,
    what      text NOT NULL,                  -- joined, left, lost, returned, cordoned, uncordoned,
                                              -- draining, revoked, quarantined, released, viability,
                                              -- envelopes
    detail    text NOT NULL,                  -- for people
    at        timestamptz NOT NULL,
    who       text,                           -- asked for it; null: nobody did
    contract  text,                           -- of `quarantined`: the contract that was lost
    substrate text                            -- and the device that lost it; null: all of the node
);
CREATE INDEX node_events_node ON node_events (node, at);
CREATE INDEX node_events_asked ON node_events (at) WHERE who IS NOT NULL;

-- One row for each result of each proof that a policy service judged.
CREATE TABLE node_proofs (
    seq         bigint NOT NULL,              -- in FIEC_RECORD
    node        text NOT NULL,
    instance    uuid NOT NULL,
    substrate   text NOT NULL,
    contract    text NOT NULL,                -- bitwise, bounded
    suite       integer NOT NULL,             -- version of the canaries
    environment bytea NOT NULL,               -- digest over binary, instruction set, driver, libraries
    passed      boolean NOT NULL,
    detail      text NOT NULL,                -- what broke the contract
    cases       integer NOT NULL,
    ran_on      text NOT NULL,
    digest      bytea NOT NULL,               -- over names and digests of all cases
    refused     text,                         -- why the proof as a whole does not count; null: verified
    proved_at   timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    judged_at   timestamptz NOT NULL,
    key         text NOT NULL,                -- the node's public key
    signature   text NOT NULL,
    PRIMARY KEY (seq, substrate, contract)
);
CREATE INDEX node_proofs_node ON node_proofs (node, judged_at);

-- Parts of executions that other nodes computed once more.
CREATE TABLE verifications (
    seq           bigint PRIMARY KEY,         -- in FIEC_RECORD
    execution     uuid NOT NULL,
    from_boundary bigint NOT NULL,            -- 0: from the beginning
    to_boundary   bigint NOT NULL,
    node          text,                       -- the node that had computed it; null: several
    by_nodes      text[] NOT NULL,            -- the nodes that computed it once more
    outcome       text NOT NULL,              -- agreed, node_corrupt, verifier_corrupt, undecided
    detail        text NOT NULL,
    at            timestamptz NOT NULL
);
CREATE INDEX verifications_execution ON verifications (execution, at);
CREATE INDEX verifications_wrong ON verifications (at) WHERE outcome <> 'agreed';

-- Every change of a tenant's quota, as the quota was after it; null: no limit.
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

-- Ledger messages that were never recorded: dropped by the broker's limit before the recorder read
-- them, or unreadable.
CREATE TABLE ledger_gaps (
    execution     uuid NOT NULL,
    first_missing bigint NOT NULL,            -- ordinals
    last_missing  bigint NOT NULL,
    seq           bigint NOT NULL,            -- of the first message after the gap
    reason        text NOT NULL,
    at            timestamptz NOT NULL,
    PRIMARY KEY (execution, first_missing)
);

-- Records (refused lines, events of nodes, quotas) that FIEC_RECORD dropped before the recorder read
-- them: more than 7 days, 1 GiB or a million records behind.
CREATE TABLE record_gaps (
    first_missing bigint PRIMARY KEY,         -- sequences of FIEC_RECORD
    last_missing  bigint NOT NULL,
    after         timestamptz NOT NULL,       -- the last record before them was recorded
    before        timestamptz NOT NULL,       -- the broker stored the first record after them
    found_at      timestamptz NOT NULL DEFAULT now()
);

-- Rows whose ledger messages the broker has lost, as they were before other messages took their
-- place. There are none if the holder of the binding appended the lost messages again; then
-- execution_events has a row of kind `healed`.
CREATE TABLE lost_rows (
    execution  uuid NOT NULL,
    table_name text NOT NULL,                 -- boundaries, placements, rebindings, decisions,
                                              -- execution_events, execution_changes
    row        jsonb NOT NULL,
    found_at   timestamptz NOT NULL           -- the broker stored the message that took its place
);
CREATE INDEX lost_rows_execution ON lost_rows (execution);

-- How far each stream is recorded, and how the recorder recognizes the stream.
CREATE TABLE recorder_checkpoint (
    stream     text PRIMARY KEY,
    seq        bigint NOT NULL,               -- last sequence that is in these tables
    updated_at timestamptz NOT NULL DEFAULT now(),
    created_ns numeric,                       -- the stream was made, in nanoseconds since 1970
    digest     bytea,                         -- of the message at the checkpoint: of its header in
                                              -- the ledger, of its text among the records
    stored_at  timestamptz                    -- the broker stored that message
) WITH (fillfactor = 10);                     -- updated with every batch: leave it room
INSERT INTO recorder_checkpoint (stream, seq) VALUES ('FIEC_LEDGER', 0), ('FIEC_RECORD', 0);

-- Outputs that boundaries of live executions have named. A live execution may be older than
-- --keep-days, after which its rows in boundaries are gone.
CREATE TABLE live_outputs (
    execution uuid NOT NULL,
    digest    text NOT NULL,                  -- hex
    PRIMARY KEY (execution, digest)
);

-- The removal of objects that no row refers to from the broker's stores.
CREATE TABLE collection (
    one            boolean PRIMARY KEY DEFAULT true CHECK (one),
    since          timestamptz NOT NULL DEFAULT now(),  -- no object goes before the grace has passed
                                              -- since then: a new database knows no older references
    outputs_until  timestamptz NOT NULL DEFAULT '-infinity', -- live_outputs has all boundaries until then
    swept_at       timestamptz,               -- end of the last sweep
    objects        bigint NOT NULL DEFAULT 0, -- that it removed, or, with --collect-dry-run, would have
    bytes          bigint NOT NULL DEFAULT 0
);
INSERT INTO collection DEFAULT VALUES;

-- Which version of views.sql is applied.
CREATE TABLE applied_views (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    digest     bytea NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
