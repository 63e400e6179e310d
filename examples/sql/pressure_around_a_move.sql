-- What did the node that was left, and the one chosen, measure a minute before and after each of
-- the last ten moves for pressure?
SELECT r.at AS moved_at, r.from_node, r.to_node, r.signal, r.high, v.node, v.at - r.at AS around,
       v.memory, v.memory_stall, v.power, v.thermal, v.latency, v.contention
FROM (SELECT * FROM rebindings WHERE cause = 'pressure' ORDER BY at DESC LIMIT 10) r
JOIN hardware_vectors v
  ON v.node IN (r.from_node, r.to_node)
 AND v.at BETWEEN r.at - interval '1 minute' AND r.at + interval '1 minute'
ORDER BY r.at DESC, v.node, v.at;
