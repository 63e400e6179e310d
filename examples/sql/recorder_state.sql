-- How far is the recorder, and which parts of the ledger did it never see?
SELECT c.stream, c.seq AS recorded_up_to, c.updated_at, now() - c.updated_at AS ago,
       (SELECT count(*) FROM ledger_gaps) AS gaps_in_all
FROM recorder_checkpoint c;
