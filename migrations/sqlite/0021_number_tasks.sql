-- Tasks have numbers, which group those of a queue that came with one insert, and results are found by the numbers: a
-- worker that completes tasks of many queues touches fewer pages (ADR 56).

CREATE TABLE numbered_tasks (
    number           INTEGER NOT NULL PRIMARY KEY, -- until the task is removed
    id_group         BLOB    NOT NULL, -- the first five bytes of the id, a quarter of a second (256 ms) of its time
    id               BLOB    NOT NULL UNIQUE,
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

INSERT INTO numbered_tasks SELECT rowid, SUBSTR(id, 1, 5), * FROM tasks ORDER BY rowid;

CREATE TABLE results_by_number (
    task             INTEGER NOT NULL, -- its number
    task_id_group    BLOB    NOT NULL,
    task_id          BLOB    NOT NULL,
    worker           TEXT    NOT NULL,
    attempt          INTEGER NOT NULL,
    completed_ms     INTEGER NOT NULL,
    surplus          INTEGER NOT NULL,
    result           BLOB    NOT NULL,
    result_encoding  INTEGER NOT NULL DEFAULT 0,
    lease_generation INTEGER NOT NULL DEFAULT 0,
    lease_grant      INTEGER NOT NULL DEFAULT 0,
    leased_ms        INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (task, worker)
) STRICT;

INSERT INTO results_by_number SELECT tasks.rowid, SUBSTR(task_id, 1, 5), results.* FROM results CROSS JOIN tasks
    ON id = task_id ORDER BY results.rowid;

DROP TABLE results;
DROP TABLE tasks;
ALTER TABLE numbered_tasks RENAME TO tasks;
ALTER TABLE results_by_number RENAME TO results;

-- In each group the tasks of a shard are together. No index has a function: SQLite could not trust it to succeed, and
-- would copy each page before a statement changes it.
CREATE INDEX tasks_on_bus ON tasks (id_group, queue, shard, id) WHERE on_bus = 1;
CREATE INDEX tasks_finished ON tasks (status, updated_ms) WHERE status <> 0;
CREATE INDEX tasks_queue ON tasks (queue, status, id);
-- In each group the results of a worker are in the order in which they came.
CREATE INDEX results_worker ON results (worker, task_id_group);

-- For a task that somebody removes by hand: another one may get its number.
CREATE TRIGGER results_of_removed_tasks AFTER DELETE ON tasks BEGIN
    DELETE FROM results WHERE task = old.number;
END;

-- An older taskd could store no result.
UPDATE meta SET value = '21' WHERE name = 'lowest_schema';
