-- How many executions finished in each of the last 60 minutes, and how long did they take?
SELECT date_trunc('minute', finished_at)                     AS minute,
       count(*) FILTER (WHERE phase = 'completed')           AS completed,
       count(*) FILTER (WHERE phase = 'failed')              AS failed,
       count(*) FILTER (WHERE phase = 'cancelled')           AS cancelled,
       percentile_disc(0.5) WITHIN GROUP (ORDER BY finished_at - submitted_at) AS median_time
FROM executions
WHERE finished_at >= now() - interval '1 hour'
GROUP BY minute
ORDER BY minute;
