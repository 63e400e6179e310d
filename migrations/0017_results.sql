-- Results over 4 KiB, which their ledger messages name by digest. The recorder copies each of them from
-- FIEC_DATA into executions.result and then deletes its row here: a row is a result that is still to be
-- copied, or that could not be copied so far.
CREATE TABLE results_to_copy (
    execution uuid PRIMARY KEY,
    digest    bytea NOT NULL,                 -- BLAKE3-256 of the JSON
    bytes     bigint NOT NULL,
    tried_at  timestamptz,                    -- the last try that failed
    failure   text                            -- and why it did
);
