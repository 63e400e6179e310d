-- Most waiting executions of a tenant; null: the default of the policy services.
ALTER TABLE quota_changes ADD COLUMN waiting bigint;
