-- Submissions over 2 KiB, which their ledger messages name by digest. While their executions live, the
-- recorder copies them from FIEC_DATA into executions.spec, as those of others: `fiec repair` needs them
-- after a loss of the broker's store. An execution that ends before its turn needs none.

-- The queue of those that are still to be copied.
CREATE INDEX executions_large ON executions (submitted_at, id) WHERE spec IS NULL AND finished_at IS NULL;

COMMENT ON COLUMN executions.spec IS
    'The submission; null where it is over 2 KiB and not copied yet, or its execution ended before that';
