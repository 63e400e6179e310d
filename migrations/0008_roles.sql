-- Two roles instead of one that may do everything: fiec_recorder writes rows and makes partitions, and
-- fiec_reader reads history. Neither changes tables, and only the recorder reads states. As in 0003, a
-- missing role does not fail the migration: an administrator creates it and runs these statements.

-- The recorder. Tables that are made later are covered by the default privileges.
DO $$
DECLARE
    home text := current_schema();
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'fiec_recorder') THEN
        BEGIN
            -- Without a password it can log in only where the server trusts the connection.
            CREATE ROLE fiec_recorder LOGIN;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL; -- made in the same moment
            WHEN insufficient_privilege THEN
                RAISE NOTICE 'role fiec_recorder was not made: this user may not create roles';
        END;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'fiec_recorder') THEN
        BEGIN
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO fiec_recorder', home);
            EXECUTE format(
                'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %I TO fiec_recorder', home);
            EXECUTE format(
                'ALTER DEFAULT PRIVILEGES IN SCHEMA %I '
                'GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO fiec_recorder', home);
            -- These two say which migrations and views are applied: `fiec setup` writes them.
            REVOKE INSERT, UPDATE, DELETE ON _sqlx_migrations, applied_views FROM fiec_recorder;
            GRANT EXECUTE ON FUNCTION fiec_ensure_partitions(date, date), fiec_drop_partitions(date)
                TO fiec_recorder;
        EXCEPTION
            WHEN insufficient_privilege THEN
                RAISE NOTICE 'role fiec_recorder was given nothing: this user may not grant';
        END;
    END IF;
END $$;

-- Partitions belong to the owner of their table, so these functions run with the owner's rights. Nobody
-- else may put a function of the same name where they look names up; PostgreSQL 14 lets everybody.
DO $$
DECLARE
    home text := current_schema();
BEGIN
    EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC', home);
    IF has_schema_privilege('public', home, 'CREATE') THEN
        RAISE NOTICE 'fiec_recorder cannot make partitions: this user may not revoke CREATE ON SCHEMA % FROM PUBLIC', home;
    ELSE
        EXECUTE format(
            'ALTER FUNCTION fiec_ensure_partitions(date, date) SECURITY DEFINER SET search_path = %I, pg_temp',
            home);
        EXECUTE format(
            'ALTER FUNCTION fiec_drop_partitions(date) SECURITY DEFINER SET search_path = %I, pg_temp', home);
    END IF;
END $$;

-- The reader. A state is a program's data, and a digest names an object with such data. A later migration
-- that makes such a table revokes it too, because the default privileges of 0003 grant it.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'fiec_reader') THEN
        REVOKE ALL ON boundary_state, results_to_copy FROM fiec_reader;
    END IF;
END $$;
