-- Ranges of tiles that several executions compute: who has split which part off, and took it back.

-- Each part that was split off. It is an execution of its own, with its own rows everywhere.
CREATE TABLE spread_splits (
    part       uuid PRIMARY KEY,
    holder     uuid NOT NULL,                 -- who has split it off
    nth        bigint,                        -- how often that was split before; null where that was not seen
    from_tile  bigint NOT NULL,
    to_tile    bigint NOT NULL,               -- the one behind its last
    split_at   timestamptz,                   -- the broker stored it; null where that was not seen
    merged_at  timestamptz                    -- its holder has taken it back
);
CREATE INDEX spread_splits_holder ON spread_splits (holder);

-- Everybody who computes, or computed, a whole: the execution that was submitted, and its parts,
-- theirs, and so on.
CREATE VIEW spread_members AS
WITH RECURSIVE members AS (
    SELECT DISTINCT s.holder AS whole, s.holder AS execution, NULL::uuid AS holder, 0 AS depth
    FROM spread_splits s
    WHERE NOT EXISTS (SELECT FROM spread_splits above WHERE above.part = s.holder)
    UNION ALL
    SELECT m.whole, s.part, s.holder, m.depth + 1
    FROM members m
    JOIN spread_splits s ON s.holder = m.execution
    WHERE m.depth < 64
)
SELECT whole, execution, holder, depth FROM members;

-- Each part: its range, where it stands, and how many tiles it has done itself (where a capsule is a
-- tile; a merge is a capsule that is none, and so may be what a program does at the end of its range).
CREATE VIEW spread_parts AS
SELECT m.whole,
       w.client_id,
       w.tenant,
       s.holder,
       s.part,
       s.from_tile,
       s.to_tile,
       s.to_tile - s.from_tile                          AS tiles,
       coalesce(e.phase, 'not made yet')                AS phase,
       e.node,
       greatest(least(e.boundary_index - (
           SELECT count(*) FROM spread_splits own WHERE own.holder = s.part AND own.merged_at IS NOT NULL
       ), s.to_tile - s.from_tile), 0)                  AS tiles_done,
       s.split_at,
       e.first_started_at,
       e.finished_at,
       s.merged_at,
       e.rebindings,
       fiec_interval(e.compute_us)                      AS computed,
       s.nth
FROM spread_splits s
JOIN spread_members m ON m.execution = s.part
LEFT JOIN executions w ON w.id = m.whole
LEFT JOIN executions e ON e.id = s.part;

-- What a whole has made: its own outputs and those of all its parts, as far as they count. Outputs
-- stay with whoever made them.
CREATE VIEW whole_outputs AS
SELECT m.whole,
       m.execution                                      AS made_by,
       o.value ->> 'name'                               AS name,
       (o.value ->> 'bytes')::bigint                    AS bytes,
       o.value ->> 'digest'                             AS digest,
       v.boundary,
       v.at
FROM spread_members m
JOIN LATERAL (
    SELECT b.index AS boundary, b.committed_at AS at, b.outputs
    FROM boundaries b
    WHERE b.execution = m.execution AND b.outputs IS NOT NULL AND b.withdrawn_at IS NULL
    UNION ALL
    SELECT e.capsules, e.finished_at, e.outputs
    FROM executions e
    WHERE e.id = m.execution AND e.outputs IS NOT NULL
) v ON true
CROSS JOIN LATERAL jsonb_array_elements(v.outputs) o;

COMMENT ON VIEW spread_parts IS 'Each part that an execution has split off, and where it stands';
COMMENT ON VIEW whole_outputs IS
    'What an execution that was split and all of its parts have made; of others: boundaries, executions';
