-- Who has had how much, who waits, and who gave way? One row for each tenant.
SELECT tenant, holds, waits, slot_time_last_hour, slot_time_last_day, percent_of_last_day,
       gave_way_last_day
FROM tenant_shares
ORDER BY slot_time_last_day DESC;
