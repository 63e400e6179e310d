-- Where did the energy of the last seven days go? Null: no counter could be read there.
SELECT day, node, placements, measured, host_joules, device_joules,
       round(coalesce(host_joules, 0) + coalesce(device_joules, 0), 3) AS joules_measured, held
FROM energy_by_node
WHERE day > (now() AT TIME ZONE 'UTC')::date - 7
ORDER BY day DESC, joules_measured DESC;
