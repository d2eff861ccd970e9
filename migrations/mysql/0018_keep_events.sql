-- Events of queues with `events = true`, until they are on the topic: a row for each transaction, or for a part of one.
-- A later change of a task has a later number, and no number comes twice.

CREATE TABLE kept_events (
    number  BIGINT     NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at_ms   BIGINT     NOT NULL, -- when the first of them happened
    records MEDIUMBLOB NOT NULL -- a KeptEvents of records.proto
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
