-- Which places are there, what can they do, and who has them?
SELECT s.node, s.status, s.substrate, s.kind, s.name, s.compute_capability, s.multiprocessors,
       pg_size_pretty(s.memory_bytes) AS memory,
       round(least(s.to_device_bytes_s, s.from_device_bytes_s) / 1e9, 1) AS copy_gb_s,
       round(p.bandwidth_bytes_s / 1e9, 1) AS host_memory_gb_s,
       p.confinement, s.holds
FROM node_substrates s
JOIN node_profiles p USING (node)
ORDER BY s.node, s.kind, s.substrate;
