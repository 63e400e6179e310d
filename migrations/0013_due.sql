-- By when somebody must act, where the ledger sets a time.
ALTER TABLE executions ADD COLUMN due_at timestamptz;
UPDATE executions SET due_at = bound_at + interval '120 seconds' WHERE finished_at IS NULL AND phase = 'bound';

COMMENT ON COLUMN executions.due_at IS
    'By when its worker must start it, or carry out what was requested; null where nothing sets a time';
