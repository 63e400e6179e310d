-- What the recorder collects from the broker's object stores and chunks, and what it must not: an
-- object goes once nothing here refers to it and it is older than the grace.

-- Outputs that boundaries of live executions have named. `boundaries` forgets after --keep-days, and a
-- live execution may be older than that.
CREATE TABLE live_outputs (
    execution uuid NOT NULL,
    digest    text NOT NULL,                  -- hex
    PRIMARY KEY (execution, digest)
);

CREATE TABLE collection (
    one            boolean PRIMARY KEY DEFAULT true CHECK (one),
    since          timestamptz NOT NULL DEFAULT now(),  -- nothing goes before the grace has passed since then:
                                                        -- a new database knows no older references
    outputs_until  timestamptz NOT NULL DEFAULT '-infinity', -- live_outputs has all boundaries until then
    swept_at       timestamptz,               -- the last sweep that ended
    objects        bigint NOT NULL DEFAULT 0, -- that it removed, or, with --collect-dry-run, would have
    bytes          bigint NOT NULL DEFAULT 0
);
INSERT INTO collection DEFAULT VALUES;

-- Few boundaries name outputs.
CREATE INDEX boundaries_outputs ON boundaries (committed_at) WHERE outputs IS NOT NULL;
CREATE INDEX executions_outputs ON executions (id) WHERE outputs IS NOT NULL;
