-- What may each tenant use at once, who has changed that, from what to what, and until when did it hold?
SELECT tenant, at, who, before, after, coalesce(until::text, 'now') AS until
FROM quota_history
ORDER BY tenant, at DESC
LIMIT 200;
