-- How many objects does the broker keep because missing history may refer to them?
SELECT held, pg_size_pretty(held_bytes) AS size, history_since, released_before, swept_at
FROM collection;
