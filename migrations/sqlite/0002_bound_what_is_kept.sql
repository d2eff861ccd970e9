-- What finished long ago is removed; its key stays here, so that it is never new again.

CREATE TABLE seen (
    key_hash BLOB    NOT NULL PRIMARY KEY,
    task_id  BLOB    NOT NULL,
    status   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The earliest finished first.
CREATE INDEX tasks_finished ON tasks (status, updated_ms) WHERE status <> 0;

-- What the task weighs, so that a page of the outbox can be cut before its tasks are read.
ALTER TABLE outbox ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
