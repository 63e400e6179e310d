-- Since when these tables know all executions. An execution that ended before may have left outputs in
-- FIEC_DATA that no row refers to.

ALTER TABLE collection
    ADD COLUMN history_since   timestamptz NOT NULL DEFAULT now(), -- objects that were stored before are held
    ADD COLUMN released_before timestamptz NOT NULL DEFAULT '-infinity', -- an operator has released those
    ADD COLUMN held            bigint NOT NULL DEFAULT 0,  -- objects that the last sweep left because
                                                           -- history that is missing may refer to them
    ADD COLUMN held_bytes      bigint NOT NULL DEFAULT 0;

-- These tables exist already: they know what happened since they were made.
UPDATE collection SET history_since = since;

COMMENT ON COLUMN collection.history_since IS
    'when these tables were made, or later if the stream has dropped messages that they never had: then broker''s clock';
COMMENT ON COLUMN collection.released_before IS
    'set by an operator: an object that was stored before is not held';
