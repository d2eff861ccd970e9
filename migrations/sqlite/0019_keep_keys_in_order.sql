-- Keys leave the unique index of tasks, where each is on a page of its own. The latest are in memory and, one row for
-- each transaction, in new_keys; a process moves the others to seen, many at a time and in order. Who is new: ADR 49.

CREATE TABLE new_keys (
    seq  INTEGER NOT NULL PRIMARY KEY, -- grows; the last row is never deleted
    keys BLOB    NOT NULL -- 32 bytes of a key's hash and 16 of its task, again and again
) STRICT;

-- Status 0: tasks has the task, and its status.
INSERT INTO seen (key_hash, task_id, status) SELECT key_hash, id, 0 FROM tasks ORDER BY key_hash;

CREATE TABLE tasks_without_index (
    id               BLOB    NOT NULL PRIMARY KEY,
    key_hash         BLOB    NOT NULL,
    queue            TEXT    NOT NULL,
    shard            INTEGER NOT NULL,
    task_key         BLOB    NOT NULL,
    replicas         INTEGER NOT NULL,
    priority         INTEGER NOT NULL,
    max_attempts     INTEGER NOT NULL,
    lease_ms         INTEGER NOT NULL,
    not_before_ms    INTEGER NOT NULL,
    headers          TEXT    NOT NULL, -- JSON: [["name", "value"], …]
    traceparent      TEXT    NOT NULL,
    created_ms       INTEGER NOT NULL,
    insertion        INTEGER NOT NULL, -- the batch that inserted the row
    status           INTEGER NOT NULL DEFAULT 0,
    completed        INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    reason           TEXT    NOT NULL DEFAULT '',
    updated_ms       INTEGER NOT NULL,
    on_bus           INTEGER NOT NULL DEFAULT 0, -- 1: unfinished, published, not in the outbox
    pub_generation   TEXT    NOT NULL DEFAULT '',
    pub_major        INTEGER NOT NULL DEFAULT 0,
    pub_minor        INTEGER NOT NULL DEFAULT 0,
    payload          BLOB    NOT NULL,
    payload_encoding INTEGER NOT NULL DEFAULT 0,
    epoch            INTEGER NOT NULL DEFAULT 0,
    backoff          BLOB    NOT NULL DEFAULT x'',
    deadline_ms      INTEGER
) STRICT;

INSERT INTO tasks_without_index SELECT * FROM tasks ORDER BY id;
DROP TABLE tasks;
ALTER TABLE tasks_without_index RENAME TO tasks;

CREATE INDEX tasks_on_bus ON tasks (id, queue, shard) WHERE on_bus = 1;
CREATE INDEX tasks_finished ON tasks (status, updated_ms) WHERE status <> 0;
CREATE INDEX tasks_queue ON tasks (queue, status, id);

-- An older taskd would take every key for new.
UPDATE meta SET value = '19' WHERE name = 'lowest_schema';
