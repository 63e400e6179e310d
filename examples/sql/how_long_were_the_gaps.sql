-- How long did executions stand still when they moved? Percentiles of the gap by cause.
SELECT cause,
       count(*)                                                            AS moves,
       round((percentile_cont(0.5)  WITHIN GROUP (ORDER BY gap_ms))::numeric, 3) AS p50_ms,
       round((percentile_cont(0.99) WITHIN GROUP (ORDER BY gap_ms))::numeric, 3) AS p99_ms,
       max(gap_ms)                                                         AS longest_ms
FROM rebinding_history
WHERE gap_ms IS NOT NULL
GROUP BY cause
ORDER BY moves DESC;
