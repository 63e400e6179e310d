-- Partitions by day (UTC). The recorder makes them ahead of time and whenever a batch holds a day
-- that has none, and drops those beyond its retention. There is no default partition: rows in one
-- would block the making of the right one later.

CREATE FUNCTION fiec_partitioned_tables() RETURNS text[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY['boundaries', 'decisions', 'execution_events', 'hardware_vectors']
$$;

-- Makes the partitions of all days from first_day to last_day that are missing; returns how many.
CREATE FUNCTION fiec_ensure_partitions(first_day date, last_day date) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    parent text;
    day    date;
    name   text;
    made   integer := 0;
BEGIN
    IF last_day - first_day > 4000 THEN
        RAISE EXCEPTION 'fiec_ensure_partitions: % to % is more than 4000 days', first_day, last_day;
    END IF;
    -- Two recorders may come to the same day at once.
    PERFORM pg_advisory_xact_lock(hashtext('fiec_partitions'));
    FOR day IN SELECT generate_series(first_day, last_day, interval '1 day')::date LOOP
        FOREACH parent IN ARRAY fiec_partitioned_tables() LOOP
            name := parent || '_' || to_char(day, 'YYYYMMDD');
            IF to_regclass(quote_ident(name)) IS NULL THEN
                EXECUTE format(
                    'CREATE TABLE %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)',
                    name, parent, day || ' 00:00:00+00', (day + 1) || ' 00:00:00+00');
                made := made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;

-- Drops the partitions of all days before first_kept; returns how many.
CREATE FUNCTION fiec_drop_partitions(first_kept date) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    child   record;
    dropped integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('fiec_partitions'));
    FOR child IN
        SELECT c.oid::regclass AS name
        FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        JOIN pg_class p ON p.oid = i.inhparent
        WHERE p.oid = ANY (SELECT to_regclass(t) FROM unnest(fiec_partitioned_tables()) t)
          AND c.relkind = 'r'
          AND right(c.relname, 8) ~ '^[0-9]{8}$'
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < first_kept
    LOOP
        EXECUTE format('DROP TABLE %s', child.name);
        dropped := dropped + 1;
    END LOOP;
    RETURN dropped;
END $$;

SELECT fiec_ensure_partitions(
    (now() AT TIME ZONE 'UTC')::date - 1, (now() AT TIME ZONE 'UTC')::date + 2);
