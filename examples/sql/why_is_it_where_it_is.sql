-- Why is each live execution where it is, or why does it wait? For one: SELECT * FROM why('its uuid').
SELECT coalesce(e.client_id, e.id::text) AS execution, w.phase, w.node, w.epoch, w.summary, w.cause,
       w.cause_in_words, w.evidence ->> 'signal' AS signal,
       fiec_candidates_in_words(w.candidates, w.omitted) AS candidates,
       (SELECT string_agg(h, E'\n') FROM jsonb_array_elements_text(w.would_help) h) AS would_help
FROM executions e
CROSS JOIN LATERAL why(e.id) w
WHERE e.finished_at IS NULL
ORDER BY e.submitted_at
LIMIT 100;
