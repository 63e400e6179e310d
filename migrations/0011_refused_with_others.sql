-- Lines that break no rule of their own.
ALTER TABLE rejections ADD COLUMN because integer;

COMMENT ON COLUMN rejections.because IS
    'The refused line of the same message because of which this one was refused; null where it broke a rule itself';
