-- What nodes say of their machines. All of it is in nodes.descriptor as jsonb, so that any of it
-- can be asked; these views are the usual questions. Rates are bytes a second; null is not
-- measured, or not told, which is not zero.

-- One row for each place that executes: the host, and each GPU or MIG slice, with what holds it.
CREATE VIEW node_substrates AS
SELECT n.node,
       n.status,
       s.value ->> 'id'                                  AS substrate,
       s.value ->> 'kind'                                AS kind,
       s.value ->> 'name'                                AS name,
       (s.value ->> 'memory_bytes')::bigint              AS memory_bytes,
       s.value #>> '{device,compute_capability}'         AS compute_capability,
       (s.value #>> '{device,multiprocessors}')::integer AS multiprocessors,
       s.value #>> '{device,bus}'                        AS bus,
       CASE WHEN s.value ->> 'kind' = 'cpu' THEN n.descriptor #> '{profile,contracts}'
            ELSE s.value #> '{device,contracts}' END     AS contracts,
       (s.value #>> '{device,to_device_bytes_s}')::bigint   AS to_device_bytes_s,
       (s.value #>> '{device,from_device_bytes_s}')::bigint AS from_device_bytes_s,
       s.value #>> '{device,missing}'                    AS not_measured_because,
       n.descriptor #>> '{profile,libraries,nvidia_driver}' AS driver,
       n.descriptor #>> '{profile,libraries,cuda_driver}'   AS cuda,
       held.executions                                   AS holds
FROM nodes n
CROSS JOIN LATERAL jsonb_array_elements(coalesce(n.descriptor -> 'substrates', '[]')) s
LEFT JOIN LATERAL (
    SELECT count(*) AS executions
    FROM executions e
    WHERE e.finished_at IS NULL AND e.phase IN ('bound', 'started')
      AND e.node = n.node AND e.substrate = s.value ->> 'id'
) held ON true;

-- One row for each memory node (NUMA, CXL) of each machine.
CREATE VIEW node_memory AS
SELECT n.node,
       (m.value ->> 'id')::integer                       AS memory_node,
       m.value ->> 'tier'                                AS tier,      -- local, or far: without processors
       m.value ->> 'cpus'                                AS cpus,
       (m.value ->> 'memory_bytes')::bigint              AS memory_bytes,
       (m.value ->> 'copy_bytes_s')::bigint              AS copy_bytes_s,
       (m.value ->> 'latency_ns')::double precision      AS latency_ns,
       (m.value ->> 'sample_bytes')::bigint              AS sample_bytes,
       (m.value ->> 'firmware_read_bytes_s')::bigint     AS firmware_read_bytes_s,
       (m.value ->> 'firmware_read_ns')::bigint          AS firmware_read_ns,
       m.value ->> 'missing'                             AS not_measured_because
FROM nodes n
CROSS JOIN LATERAL jsonb_array_elements(coalesce(n.descriptor #> '{profile,memory}', '[]')) m;

-- One row for each node: what its machine is, and what its worker may put around programs there.
CREATE VIEW node_profiles AS
SELECT n.node,
       n.status,
       n.host,
       n.cpus,
       (n.descriptor #>> '{profile,cores}')::integer             AS cores,
       n.isa,
       n.memory_limit_bytes,
       n.descriptor ->> 'memory_limit_source'                    AS memory_limit_source,
       n.descriptor #>> '{profile,kernel}'                       AS kernel,
       n.descriptor #> '{profile,contracts}'                     AS contracts,
       n.descriptor #> '{profile,confinement}'                   AS confinement,
       n.descriptor #> '{profile,libraries}'                     AS libraries,
       (SELECT max(m.copy_bytes_s) FROM node_memory m WHERE m.node = n.node) AS bandwidth_bytes_s,
       (n.descriptor #>> '{profile,measured,at}')::timestamptz   AS measured_at,
       n.descriptor #>> '{profile,measured,machine}'             AS machine
FROM nodes n;

-- A candidate is a place now: a device is said with its node.
CREATE OR REPLACE FUNCTION fiec_candidates_in_words(candidates jsonb, omitted integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT string_agg(
               (c.value ->> 'node') || coalesce(' (' || (c.value ->> 'substrate') || ')', '') || ': ' ||
               CASE
                   WHEN jsonb_array_length(coalesce(c.value -> 'rejected', '[]')) > 0 THEN
                       'rejected, ' || (SELECT string_agg(r, '; ') FROM jsonb_array_elements_text(c.value -> 'rejected') r)
                   WHEN c.value ? 'score' THEN
                       'acceptable, score ' || round((c.value ->> 'score')::numeric, 4)
                   ELSE 'acceptable'
               END,
               E'\n' ORDER BY c.ordinality)
           || CASE WHEN omitted > 0 THEN E'\nand ' || omitted || ' more' ELSE '' END
    FROM jsonb_array_elements(candidates) WITH ORDINALITY c
$$;
