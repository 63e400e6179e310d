-- How far is the recorder, and what did it never see of the ledgers and of the records?
SELECT c.stream, c.seq AS recorded_up_to, c.updated_at, now() - c.updated_at AS ago,
       CASE c.stream
           WHEN 'FIEC_LEDGER' THEN (SELECT coalesce(sum(last_missing - first_missing + 1), 0) FROM ledger_gaps)
           ELSE (SELECT coalesce(sum(last_missing - first_missing + 1), 0) FROM record_gaps)
       END AS messages_missing,
       CASE c.stream WHEN 'FIEC_LEDGER' THEN (SELECT count(*) FROM unread_messages) END AS messages_unread
FROM recorder_checkpoint c;
