-- Whose fault it was. A fault is a name, and its owner is program, node, infrastructure or submission.
-- Only crashes of the program count against retries. Null, or 0, for what was recorded before.
ALTER TABLE executions
    ADD COLUMN node_faults           bigint NOT NULL DEFAULT 0,  -- of its whole life
    ADD COLUMN infrastructure_faults bigint NOT NULL DEFAULT 0,
    ADD COLUMN fault                 text,                       -- why it failed
    ADD COLUMN fault_owner           text;                       -- whose fault that was

ALTER TABLE execution_events
    ADD COLUMN fault       text,              -- of refused, yielded, crashed and failed
    ADD COLUMN fault_owner text;
