-- The queue of submissions over 2 KiB whose executions have ended before they were copied to spec.
CREATE INDEX executions_large_ended ON executions (finished_at, id) WHERE spec IS NULL AND finished_at IS NOT NULL;

COMMENT ON COLUMN executions.spec IS
    'The submission; null where it is over 2 KiB and not copied yet';
