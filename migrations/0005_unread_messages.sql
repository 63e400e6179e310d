-- Ledger messages that the recorder cannot read, most likely of a newer version. A recorder that can
-- read them writes their rows when it starts, and deletes them here.
CREATE TABLE unread_messages (
    seq       bigint NOT NULL,                -- in FIEC_LEDGER
    digest    bytea NOT NULL,                 -- of the header; a broker that has lost messages gives
                                              -- their sequences again
    tenant    text NOT NULL,
    execution uuid NOT NULL,
    stored_at timestamptz NOT NULL,           -- the broker stored it
    header    text NOT NULL,                  -- Fiec-Event, as it was sent
    reason    text NOT NULL,                  -- why it could not be read
    PRIMARY KEY (seq, digest)
);
CREATE INDEX unread_messages_execution ON unread_messages (execution);
