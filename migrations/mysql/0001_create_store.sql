-- The same tables as in migrations/sqlite. For InnoDB of MySQL 8 and MariaDB 10.6 or later.
-- What is compared bytewise is BINARY or VARBINARY: text compares without trailing spaces, and often without case.

CREATE TABLE tasks (
    id             BINARY(16)      NOT NULL PRIMARY KEY,
    key_hash       BINARY(32)      NOT NULL UNIQUE,
    queue          VARCHAR(64)     NOT NULL,
    shard          BIGINT          NOT NULL,
    task_key       VARBINARY(4096) NOT NULL,
    replicas       BIGINT          NOT NULL,
    priority       TINYINT         NOT NULL,
    max_attempts   BIGINT          NOT NULL,
    lease_ms       BIGINT          NOT NULL,
    not_before_ms  BIGINT          NOT NULL,
    headers        MEDIUMTEXT      NOT NULL, -- JSON: [["name", "value"], …]
    traceparent    TEXT            NOT NULL,
    created_ms     BIGINT          NOT NULL,
    insertion      BIGINT          NOT NULL, -- a number of the transaction that inserted the row: tells it what is new
    status         TINYINT         NOT NULL DEFAULT 0,
    completed      BIGINT          NOT NULL DEFAULT 0,
    attempts       BIGINT          NOT NULL DEFAULT 0,
    reason         MEDIUMTEXT      NOT NULL DEFAULT (''),
    updated_ms     BIGINT          NOT NULL,
    on_bus         TINYINT         NOT NULL DEFAULT 0, -- 1: unfinished, published, not in the outbox
    pub_generation VARCHAR(255)    NOT NULL DEFAULT '',
    pub_major      BIGINT          NOT NULL DEFAULT 0,
    pub_minor      BIGINT          NOT NULL DEFAULT 0,
    payload        MEDIUMBLOB      NOT NULL,
    KEY tasks_on_bus (on_bus, id, queue, shard)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE outbox (
    task_id  BINARY(16)  NOT NULL PRIMARY KEY,
    state    TINYINT     NOT NULL,
    queue    VARCHAR(64) NOT NULL,
    priority TINYINT     NOT NULL,
    due_ms   BIGINT      NOT NULL, -- parked: never
    turn     BIGINT      NOT NULL, -- 0, and a random number each time the task comes back: what was published before is not this row
    KEY outbox_due (due_ms, task_id),
    KEY outbox_parked (state, queue, priority, task_id)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE results (
    task_id      BINARY(16)     NOT NULL,
    worker       VARBINARY(128) NOT NULL,
    attempt      BIGINT         NOT NULL,
    completed_ms BIGINT         NOT NULL,
    surplus      TINYINT        NOT NULL,
    result       MEDIUMBLOB     NOT NULL,
    PRIMARY KEY (task_id, worker)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE queue_counts (
    queue  VARCHAR(64) NOT NULL,
    status TINYINT     NOT NULL,
    count  BIGINT      NOT NULL,
    PRIMARY KEY (queue, status)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE shards (
    queue VARCHAR(64) NOT NULL,
    shard BIGINT      NOT NULL,
    life  BIGINT      NOT NULL,
    PRIMARY KEY (queue, shard)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE meta (
    name  VARCHAR(64)  NOT NULL PRIMARY KEY,
    value VARCHAR(255) NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO meta (name, value) VALUES ('store_id', REPLACE(UUID(), '-', ''));
