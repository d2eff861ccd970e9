-- The changes that somebody wants of unfinished tasks, until the queue in Redis has them. A watchdog applies the rows
-- that stay. A later wish of the same kind replaces the row, in another turn.

CREATE TABLE changes (
    task_id BLOB    NOT NULL,
    kind    INTEGER NOT NULL, -- 1 cancel, 2 its priority and NUM as tasks has them, 3 the end of a reservation
    turn    INTEGER NOT NULL, -- a random number
    at_ms   INTEGER NOT NULL,
    PRIMARY KEY (task_id, kind)
) STRICT, WITHOUT ROWID;

CREATE INDEX changes_at ON changes (kind, at_ms, task_id);

-- The queues of which no worker gets anything. A process reads them again when meta.pauses_version has another value.
CREATE TABLE paused_queues (
    queue TEXT    NOT NULL PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    who   TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

INSERT OR IGNORE INTO meta (name, value) VALUES ('pauses_version', '0');
