-- Dead letters, so that an operator can list them and send them again. The letter of a dead task has the task's id, and
-- the task's row has the rest. Others have all that they are about in `content`.

CREATE TABLE letters (
    id      BLOB    NOT NULL PRIMARY KEY,
    queue   TEXT    NOT NULL, -- '' for a record
    kind    INTEGER NOT NULL, -- 1 task, 2 discovered task, 3 record, 4 refused task
    at_ms   INTEGER NOT NULL,
    summary BLOB    NOT NULL, -- a DeadLetter of records.proto, without payload, headers and value
    content BLOB    NOT NULL  -- the same with them; empty for a dead task
) STRICT;

-- One for each set of filters, with the newest last.
CREATE INDEX letters_at ON letters (at_ms, id);
CREATE INDEX letters_queue ON letters (queue, at_ms, id);
CREATE INDEX letters_kind ON letters (kind, at_ms, id);
CREATE INDEX letters_queue_kind ON letters (queue, kind, at_ms, id);

-- How often the task was sent again. A death of an earlier epoch does not end it.
ALTER TABLE tasks ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;

INSERT OR IGNORE INTO letters (id, queue, kind, at_ms, summary, content)
    SELECT id, queue, 1, updated_ms, X'', X'' FROM tasks WHERE status <> 0 AND status = 2;
