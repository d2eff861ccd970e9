-- The changes that somebody wants of unfinished tasks, until the queue in Redis has them. A watchdog applies the rows
-- that stay. A later wish of the same kind replaces the row, in another turn.

CREATE TABLE changes (
    task_id BINARY(16) NOT NULL,
    kind    TINYINT    NOT NULL, -- 1 cancel, 2 its priority and NUM as tasks has them, 3 the end of a reservation
    turn    BIGINT     NOT NULL, -- a random number
    at_ms   BIGINT     NOT NULL,
    PRIMARY KEY (task_id, kind),
    KEY changes_at (kind, at_ms, task_id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The queues of which no worker gets anything. A process reads them again when meta.pauses_version has another value.
CREATE TABLE paused_queues (
    queue VARCHAR(64) NOT NULL PRIMARY KEY,
    at_ms BIGINT      NOT NULL,
    who   VARCHAR(255) NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT IGNORE INTO meta (name, value) VALUES ('pauses_version', '0');
