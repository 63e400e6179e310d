-- Who computes, or computed, which part of a range of tiles, and how far each is?
SELECT coalesce(client_id, whole::text) AS whole, part, from_tile, to_tile, phase, node, tiles_done, tiles,
       split_at::timestamp(0), merged_at::timestamp(0), computed
FROM spread_parts
ORDER BY split_at DESC NULLS LAST, from_tile
LIMIT 100;
