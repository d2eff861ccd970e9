-- Events of queues with `events = true`, until they are on the topic: a row for each transaction, or for a part of one.
-- A later change of a task has a later number, and no number comes twice.

CREATE TABLE kept_events (
    number  INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms   INTEGER NOT NULL, -- when the first of them happened
    records BLOB    NOT NULL -- a KeptEvents of records.proto
) STRICT;
