-- What happened to each node in the last day?
SELECT e.at, e.node, e.what, e.detail
FROM node_events e
WHERE e.at >= now() - interval '1 day'
ORDER BY e.at DESC
LIMIT 200;
