-- Records (refused lines, what happened to nodes, quotas) that FIEC_RECORD had dropped before the
-- recorder read them: more than 7 days, 1 GiB or a million records behind.
CREATE TABLE record_gaps (
    first_missing bigint PRIMARY KEY,         -- sequences of FIEC_RECORD
    last_missing  bigint NOT NULL,
    after         timestamptz NOT NULL,       -- when the last record before them was recorded
    before        timestamptz NOT NULL,       -- when the broker stored the first record after them
    found_at      timestamptz NOT NULL DEFAULT now()
);
