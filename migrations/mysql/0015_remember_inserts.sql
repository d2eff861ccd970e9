-- The idempotency keys of inserts, until the end of their windows.

CREATE TABLE idempotency_keys (
    hash        BINARY(32) NOT NULL PRIMARY KEY, -- SHA-256 of the queue and the idempotency key
    task_id     BINARY(16) NOT NULL, -- of the first insert
    fingerprint BINARY(32) NOT NULL, -- SHA-256 of what the task is
    expires_ms  BIGINT     NOT NULL,
    created     TINYINT    NOT NULL, -- 1: the first insert stored the task; 0: its key had a task before
    KEY idempotency_keys_expire (expires_ms)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
