-- A role that reads and cannot write. Roles belong to the whole cluster: another database's
-- migration may have made it, now or long ago, and this one may not be allowed to. None of that
-- fails the migration; where the role is missing, an administrator runs this file's statements.
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
-- Making and dropping partitions is the recorder's.
REVOKE EXECUTE ON FUNCTION fiec_ensure_partitions(date, date) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION fiec_drop_partitions(date) FROM PUBLIC;
