-- The messages that say when a placement started and ended: when the broker has lost messages, only
-- what those said is withdrawn. Null for placements that were recorded before.
ALTER TABLE placements
    ADD COLUMN started_in bigint,             -- ordinal of the message
    ADD COLUMN ended_in   bigint;             -- ordinal of the message
