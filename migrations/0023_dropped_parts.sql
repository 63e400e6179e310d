-- Parts whose holder's ledger was begun anew without them (`fiec repair`): nobody takes them back.
ALTER TABLE spread_splits ADD COLUMN dropped_at timestamptz;  -- the broker stored that message

CREATE OR REPLACE VIEW spread_parts AS
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
       s.nth,
       s.dropped_at
FROM spread_splits s
JOIN spread_members m ON m.execution = s.part
LEFT JOIN executions w ON w.id = m.whole
LEFT JOIN executions e ON e.id = s.part;
