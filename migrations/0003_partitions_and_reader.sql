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

-- Making and dropping partitions is the recorder's.
REVOKE EXECUTE ON FUNCTION fiec_ensure_partitions(date, date) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION fiec_drop_partitions(date) FROM PUBLIC;

-- A role that reads and cannot write. Roles belong to the whole cluster: another database may have
-- made it, or this user may not be allowed to. Neither fails the migration. Where the role is
-- missing, an administrator runs these statements. Views and tables that are made later are covered by
-- the default privileges.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'fiec_reader') THEN
        BEGIN
            -- Without a password it can log in only where the server trusts the connection.
            CREATE ROLE fiec_reader LOGIN;
            ALTER ROLE fiec_reader SET default_transaction_read_only = on;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL; -- made in the same moment
            WHEN insufficient_privilege THEN
                RAISE NOTICE 'role fiec_reader was not made: this user may not create roles';
        END;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'fiec_reader') THEN
        BEGIN
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO fiec_reader', current_schema());
            EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO fiec_reader', current_schema());
            EXECUTE format(
                'ALTER DEFAULT PRIVILEGES IN SCHEMA %I GRANT SELECT ON TABLES TO fiec_reader',
                current_schema());
        EXCEPTION
            WHEN insufficient_privilege THEN
                RAISE NOTICE 'role fiec_reader was given nothing: this user may not grant';
        END;
    END IF;
END $$;

-- Some views have hundreds of expressions: to compile them to machine code takes seconds, to run them
-- does not. The database is this system's own, so the setting holds for all of it.
DO $$
BEGIN
    EXECUTE format('ALTER DATABASE %I SET jit = off', current_database());
EXCEPTION
    WHEN insufficient_privilege THEN
        RAISE NOTICE 'jit is left as it is: this user does not own the database; SET jit = off helps';
END $$;

SELECT fiec_ensure_partitions(
    (now() AT TIME ZONE 'UTC')::date - 1, (now() AT TIME ZONE 'UTC')::date + 2);
