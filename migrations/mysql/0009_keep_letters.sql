-- Dead letters, so that an operator can list them and send them again. The letter of a dead task has the task's id, and
-- the task's row has the rest. Others have all that they are about in `content`.

CREATE TABLE letters (
    id      BINARY(16)  NOT NULL PRIMARY KEY,
    queue   VARCHAR(64) NOT NULL, -- '' for a record
    kind    TINYINT     NOT NULL, -- 1 task, 2 discovered task, 3 record, 4 refused task
    at_ms   BIGINT      NOT NULL,
    summary MEDIUMBLOB  NOT NULL, -- a DeadLetter of records.proto, without payload, headers and value
    content MEDIUMBLOB  NOT NULL, -- the same with them; empty for a dead task
    -- One for each set of filters, with the newest last.
    KEY letters_at (at_ms, id),
    KEY letters_queue (queue, at_ms, id),
    KEY letters_kind (kind, at_ms, id),
    KEY letters_queue_kind (queue, kind, at_ms, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- How often the task was sent again. A death of an earlier epoch does not end it.
ALTER TABLE tasks ADD COLUMN epoch BIGINT NOT NULL DEFAULT 0;

INSERT IGNORE INTO letters (id, queue, kind, at_ms, summary, content)
    SELECT id, queue, 1, updated_ms, '', '' FROM tasks WHERE status = 2;
