-- A broker that loses messages which it had acknowledged, and gives their sequences out again.

-- Digest (BLAKE3-256) of the last recorded message's header: what follows it names it.
ALTER TABLE executions ADD COLUMN digest bytea;

-- By what a reader knows that a stream is still the one that it has read.
ALTER TABLE recorder_checkpoint
    ADD COLUMN created_ns numeric,            -- when the stream was made, in nanoseconds since 1970
    ADD COLUMN digest bytea,                  -- of the message at the checkpoint: of its header in
                                              -- the ledger, of its text among the records
    ADD COLUMN stored_at timestamptz;         -- when the broker stored that message

-- Rows of which the ledger has lost the messages, and that were made anew from others: what stood in
-- the tables before. Where the holder of the binding appended what was lost again there are none,
-- and execution_events has a row of kind `healed`.
CREATE TABLE lost_rows (
    execution  uuid NOT NULL,
    table_name text NOT NULL,                 -- boundaries, placements, rebindings, decisions,
                                              -- execution_events, execution_changes
    row        jsonb NOT NULL,                -- the row as it was
    found_at   timestamptz NOT NULL           -- the broker stored the message that took its place
);
CREATE INDEX lost_rows_execution ON lost_rows (execution);
