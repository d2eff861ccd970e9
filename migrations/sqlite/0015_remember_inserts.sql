-- The idempotency keys of inserts, until the end of their windows.

CREATE TABLE idempotency_keys (
    hash        BLOB    NOT NULL PRIMARY KEY, -- SHA-256 of the queue and the idempotency key
    task_id     BLOB    NOT NULL, -- of the first insert
    fingerprint BLOB    NOT NULL, -- SHA-256 of what the task is
    expires_ms  INTEGER NOT NULL,
    created     INTEGER NOT NULL -- 1: the first insert stored the task; 0: its key had a task before
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_expire ON idempotency_keys (expires_ms);
