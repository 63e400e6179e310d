-- What was changed about live executions, field by field; and what waits, told at a cost that grows
-- with what waits and with nothing else.

-- Every change of a live execution (`fiec adjust`, `pin`, `exclude`, a program that asks for memory)
-- as its ledger has it. The event's own row in execution_events has the same as a sentence; what was
-- recorded before this table was is there alone.
CREATE TABLE execution_changes (
    execution uuid NOT NULL,
    ordinal   bigint NOT NULL,                -- of its message
    nth       integer NOT NULL,               -- of the changes of that message, from 0
    at        timestamptz NOT NULL,           -- the broker stored it
    who       text NOT NULL,
    change    jsonb NOT NULL,                 -- {priority, deadline, viability, nodes, exclude,
                                              -- memory_bytes, device_memory_bytes}: what is absent stayed
    PRIMARY KEY (execution, ordinal, nth)
);

-- The deadline that somebody has given an execution last, of those that were given one after they
-- were submitted. Of changes that were recorded before they were kept field by field it is read out
-- of the sentence, such as `changed by ann: priority 5, due 7200 s after its submission, else it fails`.
CREATE OR REPLACE VIEW changed_deadlines AS
SELECT DISTINCT ON (c.execution)
       c.execution, c.due_at, c.within_s, c.on_miss, c.who, c.at
FROM (
    SELECT x.execution, x.ordinal, x.nth, x.who, x.at,
           (x.change -> 'deadline' ->> 'at')::timestamptz          AS due_at,
           (x.change -> 'deadline' ->> 'within_s')::bigint         AS within_s,
           coalesce(x.change -> 'deadline' ->> 'on_miss', 'go_on') AS on_miss
    FROM execution_changes x
    WHERE x.change ? 'deadline'
    UNION ALL
    SELECT w.execution, w.ordinal, 0, w.who, w.at,
           substring(w.words FROM '^(?:priority -?\d+, )?due at ([0-9TZ:.+-]+)')::timestamptz,
           substring(w.words FROM '^(?:priority -?\d+, )?due (\d+) s after its submission')::bigint,
           CASE WHEN w.words ~ '^(?:priority -?\d+, )?due [^,]*, else it fails' THEN 'fail'
                ELSE 'go_on' END
    FROM (
        SELECT v.execution, v.ordinal, v.who, v.at,
               substr(v.detail, length('changed by ' || v.who || ': ') + 1) AS words
        FROM execution_events v
        WHERE v.kind = 'adjusted'
          AND NOT EXISTS (SELECT FROM execution_changes x
                          WHERE x.execution = v.execution AND x.ordinal = v.ordinal)
    ) w
) c
WHERE c.due_at IS NOT NULL OR c.within_s IS NOT NULL
ORDER BY c.execution, c.ordinal DESC, c.nth DESC;

-- What was told last of those that wait, one row for all that want the same; in words as well, once
-- for all of them.
CREATE OR REPLACE VIEW waiting_alike AS
SELECT DISTINCT ON (o.tenant, fiec_wants(o.spec))
       o.tenant,
       fiec_wants(o.spec)                               AS wants,
       o.id                                             AS execution,
       coalesce(o.client_id, o.id::text)                AS name,
       regexp_replace(t.summary, '^pending for \d+ ms: ', '') AS summary,
       t.at,
       t.candidates,
       t.omitted,
       t.would_help,
       fiec_candidates_in_words(t.candidates, t.omitted) AS rejected_in_words,
       (SELECT string_agg(h, E'\n') FROM jsonb_array_elements_text(t.would_help) h) AS help_in_words
FROM waiting_verdicts t
JOIN executions o ON o.id = t.execution
WHERE o.finished_at IS NULL AND o.phase = 'pending' AND o.spec IS NOT NULL AND NOT o.spec ? 'after'
  AND t.at >= greatest(o.submitted_at, o.bound_at, o.yielded_at)
  AND NOT EXISTS (SELECT FROM execution_events v WHERE v.execution = o.id AND v.kind = 'adjusted')
ORDER BY o.tenant, fiec_wants(o.spec), t.at DESC;

-- The same as before, with no more work for one that waits than for its own rows: what it cannot have
-- is not looked for (a decision before it was bound, an event before its second message); whether it
-- was changed, which is asked of all, is answered from one set; and what is the same for many is put
-- into words once.
CREATE OR REPLACE VIEW why_pending AS
SELECT e.id                                             AS execution,
       e.client_id,
       e.tenant,
       e.program,
       e.phase,
       e.epoch,
       now() - greatest(e.submitted_at, e.bound_at, e.yielded_at, ev.at) AS waiting,
       CASE
           WHEN e.phase = 'bound' THEN
               'bound to ' || e.node || ', which has not started it'
               || CASE
                      WHEN n.node IS NULL THEN ' (the node is not known here)'
                      WHEN n.status <> 'up' THEN ' (the node is ' || n.status || ')'
                      WHEN n.running >= n.slots THEN ' (all ' || n.slots || ' slots are busy, '
                           || coalesce(n.queued, 0) || ' wait)'
                      ELSE ''
                  END
           WHEN w.summary IS NOT NULL THEN w.summary
           WHEN awaits.words IS NOT NULL THEN 'pending: ' || awaits.words
           WHEN alike.summary IS NOT NULL THEN
               'pending, as ' || alike.name || ', which wants the same: ' || alike.summary
           WHEN ev.kind IS NOT NULL THEN 'waits for a node since it was ' || ev.kind || ': ' || ev.detail
           WHEN e.epoch = 0 THEN 'has never been bound: no node was acceptable when it was last looked at, '
                                 || 'or it was not looked at yet'
           ELSE 'waits for a node'
       END                                              AS why,
       CASE WHEN d.at IS NOT NULL
            THEN fiec_candidates_in_words(d.candidates, d.omitted)
       END                                              AS last_candidates,
       d.at                                             AS last_decided_at,
       known.words                                      AS nodes_known,
       CASE WHEN w.execution IS NULL THEN alike.rejected_in_words
            ELSE fiec_candidates_in_words(w.candidates, w.omitted)
       END                                              AS rejected,
       CASE WHEN w.execution IS NULL THEN alike.help_in_words
            ELSE (SELECT string_agg(h, E'\n') FROM jsonb_array_elements_text(w.would_help) h)
       END                                              AS would_help,
       coalesce(w.at, alike.at)                         AS told_at
FROM executions e
LEFT JOIN nodes n ON n.node = e.node
-- OFFSET 0 keeps the condition where it is: before the look.
LEFT JOIN LATERAL (
    SELECT d.candidates, d.omitted, d.at
    FROM (SELECT e.id, e.submitted_at - interval '1 hour' AS since WHERE e.epoch > 0 OFFSET 0) had
    CROSS JOIN LATERAL (
        SELECT d.candidates, d.omitted, d.at
        FROM decisions d
        -- The bound on time lets whole days of partitions be passed over.
        WHERE d.execution = had.id AND d.at >= had.since
        ORDER BY d.ordinal DESC LIMIT 1
    ) d
) d ON true
LEFT JOIN LATERAL (
    SELECT v.kind, v.detail, v.at
    FROM (SELECT e.id, e.submitted_at - interval '1 hour' AS since WHERE e.ordinal > 1 OFFSET 0) had
    CROSS JOIN LATERAL (
        SELECT v.kind, v.detail, v.at
        FROM execution_events v
        WHERE v.execution = had.id AND v.at >= had.since AND v.kind IN ('yielded', 'refused', 'resumed')
        ORDER BY v.ordinal DESC LIMIT 1
    ) v
) ev ON true
LEFT JOIN LATERAL fiec_waits(e.id, greatest(e.submitted_at, e.bound_at, e.yielded_at, ev.at)) w
    ON e.phase = 'pending'
CROSS JOIN LATERAL (
    SELECT CASE WHEN e.phase = 'pending' AND w.execution IS NULL AND e.spec ? 'after'
                THEN fiec_awaits(e.id) END AS words
) awaits
LEFT JOIN waiting_alike alike
    ON e.phase = 'pending' AND w.execution IS NULL AND awaits.words IS NULL
   AND alike.tenant = e.tenant AND alike.wants = fiec_wants(e.spec)
   AND NOT EXISTS (SELECT FROM execution_events v WHERE v.execution = e.id AND v.kind = 'adjusted')
CROSS JOIN LATERAL (
    SELECT coalesce(
               string_agg(
                   k.node || ': ' || k.status
                   || CASE WHEN k.cordoned THEN ', cordoned' ELSE '' END
                   || CASE WHEN k.draining THEN ', draining' ELSE '' END
                   || CASE WHEN k.viability IS NOT NULL THEN ', ' || k.viability ELSE '' END
                   || CASE WHEN e.program IS NOT NULL AND k.programs IS NOT NULL
                                AND NOT e.program = ANY (k.programs)
                           THEN ', does not run ' || e.program ELSE '' END
                   || CASE WHEN k.running >= k.slots THEN ', all slots busy' ELSE '' END,
                   E'\n' ORDER BY k.node),
               'no node has joined') AS words
    FROM (SELECT * FROM nodes ORDER BY node LIMIT 50) k
) known
WHERE e.finished_at IS NULL AND e.phase IN ('pending', 'bound');

-- Views such as this one have hundreds of expressions: making machine code of them takes seconds, and
-- running them does not. The database is this system's own, so that holds for all of it.
DO $$
BEGIN
    EXECUTE format('ALTER DATABASE %I SET jit = off', current_database());
EXCEPTION
    WHEN insufficient_privilege THEN
        RAISE NOTICE 'jit is left as it is: this user does not own the database; SET jit = off helps';
END $$;
