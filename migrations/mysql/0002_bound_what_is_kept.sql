-- What finished long ago is removed; its key stays here, so that it is never new again.

CREATE TABLE seen (
    key_hash BINARY(32) NOT NULL PRIMARY KEY,
    task_id  BINARY(16) NOT NULL,
    status   TINYINT    NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The earliest finished first.
ALTER TABLE tasks ADD KEY tasks_finished (status, updated_ms);

-- What the task weighs, so that a page of the outbox can be cut before its tasks are read.
ALTER TABLE outbox ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0;
