-- How each place of each node stands with each contract, said of the place itself: a device that
-- has lost a contract has lost it alone, one that nobody has proved yet has a row that says so,
-- and what was proved before a release does not count again.
--
-- A node event's detail names the place: 'bitwise: why' is all of a node, 'bitwise on GPU-…: why'
-- one of its devices.
CREATE OR REPLACE VIEW node_trust AS
WITH places AS (
    SELECT node, substrate, contract FROM node_proofs
    UNION
    SELECT n.node, s.value ->> 'id', c.contract
    FROM nodes n
    CROSS JOIN LATERAL jsonb_array_elements(coalesce(n.descriptor -> 'substrates', '[]')) s
    CROSS JOIN (VALUES ('bitwise'), ('bounded')) c (contract)
)
SELECT t.node,
       t.substrate,
       t.contract,
       CASE
           WHEN q.what = 'quarantined' THEN 'quarantined'
           WHEN p.seq IS NULL THEN 'unproved'
           WHEN p.refused IS NOT NULL THEN 'refused'
           WHEN r.at > p.proved_at THEN 'outdated'
           WHEN NOT p.passed THEN 'failed'
           WHEN p.expires_at < now() THEN 'expired'
           ELSE 'proved'
       END                                              AS standing,
       CASE
           WHEN q.what = 'quarantined' THEN q.detail
           WHEN p.refused IS NOT NULL THEN p.refused
           WHEN r.at > p.proved_at THEN 'it was released since: ' || r.detail
           ELSE nullif(p.detail, '')
       END                                              AS why,
       p.proved_at,
       p.expires_at,
       p.suite,
       p.ran_on,
       encode(p.environment, 'hex')                     AS environment,
       -- Of a place that is quarantined: the place that was, which may be all of the node.
       CASE WHEN q.what = 'quarantined' THEN q.place END AS lost_with
FROM places t
LEFT JOIN LATERAL (
    SELECT * FROM node_proofs p
    WHERE p.node = t.node AND p.substrate = t.substrate AND p.contract = t.contract
    ORDER BY p.judged_at DESC, p.seq DESC LIMIT 1
) p ON true
LEFT JOIN LATERAL (
    SELECT e.at, e.detail FROM node_events e
    WHERE e.node = t.node AND e.what = 'released'
    ORDER BY e.seq DESC LIMIT 1
) r ON true
LEFT JOIN LATERAL (
    SELECT e.what, e.detail,
           CASE WHEN starts_with(e.detail, t.contract || ':') THEN 'node' ELSE t.substrate END AS place
    FROM node_events e
    WHERE e.node = t.node
      AND (e.what = 'released'
           OR (e.what = 'quarantined'
               AND (starts_with(e.detail, t.contract || ':')
                    OR starts_with(e.detail, t.contract || ' on ' || t.substrate || ':'))))
    ORDER BY e.seq DESC LIMIT 1
) q ON true;
