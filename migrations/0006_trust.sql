-- What nodes proved of themselves, what they lost, and what was computed once more.

-- One row for each result of each proof that a policy service judged.
CREATE TABLE node_proofs (
    seq         bigint NOT NULL,              -- in FIEC_RECORD
    node        text NOT NULL,
    instance    uuid NOT NULL,
    substrate   text NOT NULL,
    contract    text NOT NULL,                -- bitwise, bounded
    suite       integer NOT NULL,             -- version of the canaries
    environment bytea NOT NULL,               -- digest over binary, instruction set, driver, libraries
    passed      boolean NOT NULL,
    detail      text NOT NULL,                -- what broke it
    cases       integer NOT NULL,
    ran_on      text NOT NULL,
    digest      bytea NOT NULL,               -- over names and digests of all cases
    refused     text,                         -- why the proof as a whole does not count; null = verified
    proved_at   timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    judged_at   timestamptz NOT NULL,
    key         text NOT NULL,                -- the node's public key
    signature   text NOT NULL,
    PRIMARY KEY (seq, substrate, contract)
);
CREATE INDEX node_proofs_node ON node_proofs (node, judged_at);

-- Parts of executions that were computed once more by other nodes.
CREATE TABLE verifications (
    seq           bigint PRIMARY KEY,         -- in FIEC_RECORD
    execution     uuid NOT NULL,
    from_boundary bigint NOT NULL,            -- 0 = from the beginning
    to_boundary   bigint NOT NULL,
    node          text,                       -- who had computed it; null = several
    by_nodes      text[] NOT NULL,            -- who computed it once more
    outcome       text NOT NULL,              -- agreed, node_corrupt, verifier_corrupt, undecided
    detail        text NOT NULL,
    at            timestamptz NOT NULL
);
CREATE INDEX verifications_execution ON verifications (execution, at);
CREATE INDEX verifications_wrong ON verifications (at) WHERE outcome <> 'agreed';

-- Reached on a node that was found out later; the execution went back behind it.
ALTER TABLE boundaries ADD COLUMN withdrawn_at timestamptz;

-- How each node stands with each contract.
CREATE VIEW node_trust AS
SELECT p.node,
       p.substrate,
       p.contract,
       CASE
           WHEN q.what = 'quarantined' THEN 'quarantined'
           WHEN p.refused IS NOT NULL THEN 'refused'
           WHEN NOT p.passed THEN 'failed'
           WHEN p.expires_at < now() THEN 'expired'
           ELSE 'proved'
       END                                              AS standing,
       coalesce(CASE WHEN q.what = 'quarantined' THEN q.detail END, p.refused, nullif(p.detail, '')) AS why,
       p.proved_at,
       p.expires_at,
       p.suite,
       p.ran_on,
       encode(p.environment, 'hex')                     AS environment
FROM (
    SELECT DISTINCT ON (node, substrate, contract) *
    FROM node_proofs ORDER BY node, substrate, contract, judged_at DESC
) p
LEFT JOIN LATERAL (
    SELECT e.what, e.detail
    FROM node_events e
    WHERE e.node = p.node
      AND (e.what = 'released' OR (e.what = 'quarantined' AND e.detail LIKE p.contract || ':%'))
    ORDER BY e.seq DESC LIMIT 1
) q ON true;

-- The reader's rights on what this file has made; see 0004.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'fiec_reader') THEN
        BEGIN
            EXECUTE 'GRANT SELECT ON node_proofs, verifications, node_trust TO fiec_reader';
        EXCEPTION
            WHEN insufficient_privilege THEN
                RAISE NOTICE 'role fiec_reader was given nothing: this user may not grant';
        END;
    END IF;
END $$;
