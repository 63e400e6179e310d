-- Numbers that programs report by name (`run.progress(loss=0.31)`). People read the view
-- execution_series.
CREATE TABLE series_points (
    execution uuid NOT NULL,
    name      text NOT NULL,
    boundary  bigint NOT NULL,             -- that ends the capsule of the last report
    epoch     bigint NOT NULL,             -- under which binding it was committed
    at        timestamptz NOT NULL,        -- broker's clock: when it stored the commit
    mean      double precision NOT NULL,   -- of the reports that are drawn together
    lowest    double precision NOT NULL,
    highest   double precision NOT NULL,
    reports   bigint NOT NULL,             -- how many these are: 1 if the point is a report of its own
    PRIMARY KEY (execution, name, boundary)
);

-- Points are drawn together twice: while there are too many of one name, the older half of them; and
-- --keep-days after the end of their execution, until few are left.
CREATE TABLE series_thinning (
    one   boolean PRIMARY KEY DEFAULT true CHECK (one),
    until timestamptz NOT NULL DEFAULT now() -- done for executions that ended before; those from
                                             -- before this table have no points
);
INSERT INTO series_thinning DEFAULT VALUES;
