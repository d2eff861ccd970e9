-- The same tables as in migrations/mysql, with SQLite's means.

CREATE TABLE tasks (
    id             BLOB    NOT NULL PRIMARY KEY,
    key_hash       BLOB    NOT NULL UNIQUE,
    queue          TEXT    NOT NULL,
    shard          INTEGER NOT NULL,
    task_key       BLOB    NOT NULL,
    replicas       INTEGER NOT NULL,
    priority       INTEGER NOT NULL,
    max_attempts   INTEGER NOT NULL,
    lease_ms       INTEGER NOT NULL,
    not_before_ms  INTEGER NOT NULL,
    headers        TEXT    NOT NULL, -- JSON: [["name", "value"], …]
    traceparent    TEXT    NOT NULL,
    created_ms     INTEGER NOT NULL,
    insertion      INTEGER NOT NULL, -- a number of the transaction that inserted the row: tells it what is new
    status         INTEGER NOT NULL DEFAULT 0,
    completed      INTEGER NOT NULL DEFAULT 0,
    attempts       INTEGER NOT NULL DEFAULT 0,
    reason         TEXT    NOT NULL DEFAULT '',
    updated_ms     INTEGER NOT NULL,
    on_bus         INTEGER NOT NULL DEFAULT 0, -- 1: unfinished, published, not in the outbox
    pub_generation TEXT    NOT NULL DEFAULT '',
    pub_major      INTEGER NOT NULL DEFAULT 0,
    pub_minor      INTEGER NOT NULL DEFAULT 0,
    payload        BLOB    NOT NULL
) STRICT;

-- Only what is on its way: inserting a task and keeping a finished one cost nothing here.
CREATE INDEX tasks_on_bus ON tasks (id, queue, shard) WHERE on_bus = 1;

CREATE TABLE outbox (
    task_id  BLOB    NOT NULL PRIMARY KEY,
    state    INTEGER NOT NULL,
    queue    TEXT    NOT NULL,
    priority INTEGER NOT NULL,
    due_ms   INTEGER NOT NULL, -- parked: never
    turn     INTEGER NOT NULL  -- 0, and a random number each time the task comes back: what was published before is not this row
) STRICT, WITHOUT ROWID;

CREATE INDEX outbox_due ON outbox (due_ms, task_id);
CREATE INDEX outbox_parked ON outbox (queue, priority, task_id) WHERE state = 1;

CREATE TABLE results (
    task_id      BLOB    NOT NULL,
    worker       TEXT    NOT NULL,
    attempt      INTEGER NOT NULL,
    completed_ms INTEGER NOT NULL,
    surplus      INTEGER NOT NULL,
    result       BLOB    NOT NULL,
    PRIMARY KEY (task_id, worker)
) STRICT;

CREATE TABLE queue_counts (
    queue  TEXT    NOT NULL,
    status INTEGER NOT NULL,
    count  INTEGER NOT NULL,
    PRIMARY KEY (queue, status)
) STRICT, WITHOUT ROWID;

CREATE TABLE shards (
    queue TEXT    NOT NULL,
    shard INTEGER NOT NULL,
    life  INTEGER NOT NULL,
    PRIMARY KEY (queue, shard)
) STRICT, WITHOUT ROWID;

CREATE TABLE meta (
    name  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO meta (name, value) VALUES ('store_id', lower(hex(randomblob(16))));
