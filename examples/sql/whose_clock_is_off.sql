-- Whose clock differs from the broker's, and by how much? Times in these tables are by the broker's.
SELECT node, ahead_ms, within_ms, far, measured_at, status
FROM node_clocks
ORDER BY abs(ahead_ms) DESC;
