-- By when a worker must act, where the ledger sets a time.
ALTER TABLE executions ADD COLUMN due_at timestamptz;
UPDATE executions SET due_at = bound_at + interval '120 seconds' WHERE finished_at IS NULL AND phase = 'bound';
-- A pause may take longer: it has no time before the next message.
UPDATE executions SET due_at = recorded_at + interval '60 seconds'
WHERE finished_at IS NULL AND phase = 'started' AND requested = 'cancel';

COMMENT ON COLUMN executions.due_at IS
    'By when its worker must start it, or carry out what was requested; null where nothing sets a time';
