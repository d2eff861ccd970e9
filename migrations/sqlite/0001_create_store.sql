-- The same tables as in migrations/mysql, with SQLite's means.

-- The database itself ---------------------------------------------------------------------------

-- Single values of the whole database, by name. `store_id` names the database in Redis and in
-- other servers, so that two databases are never mixed up.
CREATE TABLE meta (
    name  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO meta (name, value) VALUES
    ('store_id', lower(hex(randomblob(16)))),
    -- The first schema that a taskd must know to work with this one. A migration that an older
    -- taskd cannot live with raises it.
    ('lowest_schema', '1'),
    -- The partitions among which tasks with limit keys are spread; 0: there never was one.
    ('limit_partitions', '0'),
    -- The Redis that holds the tasks of this database, and how often its processes have
    -- renewed that.
    ('redis', ''),
    -- Each change of these tables raises its number.
    ('shards_version', '0'),
    ('pauses_version', '0'),
    ('limits_version', '0'),
    ('tokens_version', '0'),
    ('topics_version', '0'),
    ('feeds_version', '0'),
    ('topologies_version', '0'),
    -- Each count of tasks raises it: see tasks.era.
    ('era', '0');

-- Tasks and their results -----------------------------------------------------------------------

-- Tasks, finished ones included until they are removed. A task is in its batch while on_bus = 1
-- and pub_generation = ''. Rows lie in the order of their numbers, which group the tasks of a
-- queue that came with one insert: a worker that completes tasks of many queues touches fewer
-- pages.
CREATE TABLE tasks (
    number           INTEGER NOT NULL PRIMARY KEY, -- until the task is removed
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
    status           INTEGER NOT NULL DEFAULT 0, -- 0 unfinished, 1 completed, 2 dead, 3 cancelled
    completed        INTEGER NOT NULL DEFAULT 0, -- workers that have completed it
    attempts         INTEGER NOT NULL DEFAULT 0,
    reason           TEXT    NOT NULL DEFAULT '', -- why it is dead
    updated_ms       INTEGER NOT NULL,
    on_bus           INTEGER NOT NULL DEFAULT 0, -- 1: unfinished, published, not in the outbox
    pub_generation   TEXT    NOT NULL DEFAULT '', -- where it was published alone: of the topic
    pub_major        INTEGER NOT NULL DEFAULT 0,
    pub_minor        INTEGER NOT NULL DEFAULT 0,
    payload          BLOB    NOT NULL,
    payload_encoding INTEGER NOT NULL DEFAULT 0, -- 1 bytes, 2 text, 3 JSON, 0 nobody said it
    -- How often it was sent again; a death of an earlier epoch does not end it.
    epoch            INTEGER NOT NULL DEFAULT 0,
    backoff          BLOB    NOT NULL DEFAULT x'', -- its own, if it has one (`Backoff::packed`)
    deadline_ms      INTEGER, -- if it has one; `changes` has a row of kind 5 until it is final
    limit_key        TEXT, -- what it shares its limits with, if it has limits
    sequence         TEXT, -- the name of its sequence in the queue, if it is in one
    on_dead          INTEGER, -- if it dies, the next ones of its sequence: 0 go on, 1 wait
    sequence_place   INTEGER, -- its place there, once it ended without being completed
    -- meta.era when reports or operators changed it last. A count with a later era saw that.
    era              INTEGER NOT NULL DEFAULT 0,
    tree             BLOB, -- the tree that it is in, and its subtree behind it; NULL or empty: none
    execution        BLOB -- the execution that it is a step of; NULL or empty: none
) STRICT;

-- The earliest finished first.
CREATE INDEX tasks_finished ON tasks (status, updated_ms) WHERE status <> 0;
-- Lists of tasks, in the order of time. An index for each status: a task that is completed leaves
-- one and is added at the end of another, which costs less than moving it within one.
-- Walks over the tasks on the bus go by queue, by the first of them.
CREATE INDEX tasks_unfinished ON tasks (queue, id, on_bus, shard) WHERE status = 0;
CREATE INDEX tasks_completed ON tasks (queue, id) WHERE status = 1;
CREATE INDEX tasks_given_up ON tasks (queue, status, id) WHERE status > 1; -- dead, cancelled

-- What workers reported with completed tasks.
CREATE TABLE results (
    task             INTEGER NOT NULL, -- its number
    -- The first five bytes of the id: a quarter of a second (256 ms).
    task_id_group    BLOB    NOT NULL,
    task_id          BLOB    NOT NULL,
    worker           TEXT    NOT NULL,
    attempt          INTEGER NOT NULL,
    completed_ms     INTEGER NOT NULL,
    surplus          INTEGER NOT NULL, -- 1: the task had been completed without it
    result           BLOB    NOT NULL,
    result_encoding  INTEGER NOT NULL DEFAULT 0, -- as tasks.payload_encoding
    -- The lease, by which a repeat of the report is known.
    lease_generation INTEGER NOT NULL DEFAULT 0,
    lease_grant      INTEGER NOT NULL DEFAULT 0,
    leased_ms        INTEGER NOT NULL DEFAULT 0, -- when the lease was given; 0: unknown
    PRIMARY KEY (task, worker)
) STRICT;

-- Lists of the tasks that a worker has completed. In each group the results of a worker are in the
-- order in which they came. No index has a function: SQLite could not trust it to succeed, and would
-- copy each page before a statement changes it.
CREATE INDEX results_worker ON results (worker, task_id_group);
-- For a task that somebody removes by hand: another one may get its number.
CREATE TRIGGER results_of_removed_tasks AFTER DELETE ON tasks BEGIN
    DELETE FROM results WHERE task = old.number;
END;

-- Attempts of tasks that failed. Those that were completed are in `results`.
CREATE TABLE history (
    -- 48 bits of at_ms, then a hash of the task and the lease.
    id        BLOB    NOT NULL PRIMARY KEY,
    task_id   BLOB    NOT NULL,
    state     INTEGER NOT NULL, -- 3 rejected, 4 expired
    leased_ms INTEGER NOT NULL, -- 0: unknown
    at_ms     INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    worker    TEXT    NOT NULL,
    reason    TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX history_task ON history (task_id, id);

-- Which tasks are new ---------------------------------------------------------------------------

-- The keys of tasks, so that none is ever new again: of removed tasks and, with status 0, of those
-- in `tasks`, where the task has its status. The index of a key for each row of `tasks` would have
-- each key on a page of its own; here a process adds many at a time, in order.
CREATE TABLE seen (
    key_hash BLOB    NOT NULL PRIMARY KEY,
    task_id  BLOB    NOT NULL,
    status   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The latest keys, a row for each transaction, until a process moves them to `seen`.
CREATE TABLE new_keys (
    seq  INTEGER NOT NULL PRIMARY KEY, -- grows; the last row is never deleted
    keys BLOB    NOT NULL -- 32 bytes of a key's hash and 16 of its task, again and again
) STRICT;

-- The idempotency keys of inserts, until the end of their windows.
CREATE TABLE idempotency_keys (
    hash        BLOB    NOT NULL PRIMARY KEY, -- SHA-256 of the queue and the idempotency key
    task_id     BLOB    NOT NULL, -- of the first insert
    fingerprint BLOB    NOT NULL, -- SHA-256 of what the task is
    expires_ms  INTEGER NOT NULL,
    -- 1: the first insert stored the task; 0: its key had a task before.
    created     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_expire ON idempotency_keys (expires_ms);

-- What goes to the bus --------------------------------------------------------------------------

-- New tasks go to the bus by the batch: tasks.insertion names it, and one row says of all its
-- tasks whether they are published, and where.
CREATE TABLE batches (
    batch      INTEGER NOT NULL PRIMARY KEY,
    first_id   BLOB    NOT NULL, -- the least and the greatest id of its tasks
    last_id    BLOB    NOT NULL,
    tasks      INTEGER NOT NULL, -- how many it had
    due_ms     INTEGER NOT NULL, -- published: never
    generation TEXT    NOT NULL DEFAULT '', -- of the topic; '': not published, as far as is known
    places     TEXT    NOT NULL DEFAULT '' -- JSON: {"partition": [major, minor], …}
) STRICT;

CREATE INDEX batches_due ON batches (due_ms) WHERE generation = '';

-- Tasks that go to the bus one by one: scheduled ones, and those that came back from their queue.
CREATE TABLE outbox (
    task_id  BLOB    NOT NULL PRIMARY KEY,
    -- 1 parked (its queue had no room), 2 scheduled, 3 missing in its queue, 4 crowded (enough of
    -- its limit key are in Redis), 5 behind another task of its sequence.
    state    INTEGER NOT NULL,
    queue    TEXT    NOT NULL,
    priority INTEGER NOT NULL,
    due_ms   INTEGER NOT NULL, -- parked, crowded, behind: never
    -- A random number each time it comes back: what was published before is not this row.
    turn     INTEGER NOT NULL,
    -- Its weight, so that a page can be cut before its tasks are read.
    bytes    INTEGER NOT NULL DEFAULT 0,
    limit_hash BLOB NOT NULL DEFAULT x'', -- of a crowded one, of its limit key
    sequence_hash BLOB NOT NULL DEFAULT x'', -- of one that is behind: of its sequence
    place    INTEGER NOT NULL DEFAULT 0 -- of one that is behind: the lowest goes next
) STRICT, WITHOUT ROWID;

CREATE INDEX outbox_due ON outbox (due_ms, task_id);
CREATE INDEX outbox_parked ON outbox (queue, priority, task_id) WHERE state = 1;
CREATE INDEX outbox_crowded ON outbox (queue, limit_hash, priority, task_id) WHERE state = 4;
CREATE INDEX outbox_behind ON outbox (sequence_hash, place, task_id) WHERE state = 5;

-- Sequences with an unfinished task, or with a dead one that holds the others up. The head is the
-- one that may go to the bus; the others wait in the outbox.
CREATE TABLE sequences (
    hash       BLOB    NOT NULL PRIMARY KEY, -- the first 16 bytes of SHA-256 of queue and name
    queue      TEXT    NOT NULL,
    head       BLOB    NOT NULL, -- a task
    place      INTEGER NOT NULL, -- of the head
    waiting_tasks INTEGER NOT NULL, -- how many are behind it
    last_place INTEGER NOT NULL -- the highest that was given
) STRICT, WITHOUT ROWID;

-- Trees: a task, its root, and all that is discovered from it. The transaction that changes the
-- status of a task changes the counts of its tree.
CREATE TABLE trees (
    id          BLOB    NOT NULL PRIMARY KEY, -- of its root
    queue       TEXT    NOT NULL, -- of its root
    state       INTEGER NOT NULL, -- 0 open, 1 done, 2 failed
    epoch       INTEGER NOT NULL, -- how often it was opened again after an end
    open_tasks  INTEGER NOT NULL, -- unfinished
    held_tasks  INTEGER NOT NULL, -- dead ones that keep it open
    tasks       INTEGER NOT NULL, -- all that were ever added
    dead        INTEGER NOT NULL, -- and not sent again
    cancelled   INTEGER NOT NULL, -- and not sent again
    letters     INTEGER NOT NULL, -- discovered tasks that became letters, and were not sent again
    late        INTEGER NOT NULL, -- surplus reports, and outputs to joins of no subtree
    joins       INTEGER NOT NULL, -- subtrees that joins wait for
    cancelling  INTEGER NOT NULL, -- 1: nothing is added any more
    on_dead     INTEGER NOT NULL, -- what a dead task means: 0 it counts, 1 nothing, 2 it holds the tree
    deadline_ms INTEGER NOT NULL, -- 0: none
    then_task   TEXT    NOT NULL, -- JSON: the task of its end; '': none
    opened_ms   INTEGER NOT NULL,
    ended_ms    INTEGER NOT NULL, -- 0: it is open
    feed        TEXT    NOT NULL, -- the feed that is told of its end; '': none
    reference   TEXT    NOT NULL -- of the feed's record
) STRICT, WITHOUT ROWID;

CREATE INDEX trees_state ON trees (state, id);
CREATE INDEX trees_queue ON trees (queue, id);
CREATE INDEX trees_queue_state ON trees (queue, state, id);
CREATE INDEX trees_ended ON trees (state, ended_ms);

-- The tasks of each tree, until they are removed. An index on tasks.tree would have an entry for
-- each task without a tree in MySQL.
CREATE TABLE tree_tasks (
    tree BLOB NOT NULL,
    task BLOB NOT NULL,
    PRIMARY KEY (tree, task)
) STRICT, WITHOUT ROWID;

-- Subtrees: what came out of one task of a fork, until its join has all of it.
CREATE TABLE subtrees (
    id         BLOB    NOT NULL PRIMARY KEY,
    tree       BLOB    NOT NULL,
    path       BLOB    NOT NULL, -- the subtrees around it, outermost first
    fork       BLOB    NOT NULL, -- a task
    open_tasks INTEGER NOT NULL, -- unfinished
    held_tasks INTEGER NOT NULL, -- dead ones that keep it open
    children   INTEGER NOT NULL, -- subtrees within it
    parts      INTEGER NOT NULL, -- all that came, stored or not
    part_bytes INTEGER NOT NULL, -- theirs, roughly
    join_task  TEXT    NOT NULL -- JSON: the task that it becomes
) STRICT, WITHOUT ROWID;

CREATE INDEX subtrees_tree ON subtrees (tree);

-- The outputs that joins wait for the last of, and the tasks of their forks.
CREATE TABLE parts (
    subtree  BLOB    NOT NULL,
    task     BLOB    NOT NULL, -- which sent it
    place    INTEGER NOT NULL, -- in its report; -1: it is the task of the fork itself
    stage    TEXT    NOT NULL,
    port     TEXT    NOT NULL,
    part_key BLOB    NOT NULL,
    encoding INTEGER NOT NULL, -- as in tasks
    payload  BLOB    NOT NULL,
    PRIMARY KEY (subtree, task, place)
) STRICT, WITHOUT ROWID;

-- Events of queues with `events = true`, until they are on the topic: a row for each transaction,
-- or for a part of one. A later change of a task has a later number, and no number comes twice.
CREATE TABLE kept_events (
    number  INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms   INTEGER NOT NULL, -- when the first of them happened
    records BLOB    NOT NULL -- a KeptEvents of records.proto
) STRICT;

-- Queues ----------------------------------------------------------------------------------------

-- How many tasks a queue has in each status.
CREATE TABLE queue_counts (
    queue  TEXT    NOT NULL,
    status INTEGER NOT NULL, -- as in tasks; 4: those of status 0 that are behind in a sequence
    count  INTEGER NOT NULL,
    PRIMARY KEY (queue, status)
) STRICT, WITHOUT ROWID;

-- The queues that have unfinished tasks, however many names there ever were.
CREATE INDEX queue_counts_unfinished ON queue_counts (queue) WHERE status = 0 AND count <> 0;

-- What inserts and reports brought and SQL did not store, for the books. The queue '' has the
-- tasks whose queue is not known here. A process adds its numbers once a second, so they cost no
-- insert anything.
CREATE TABLE turned_away (
    queue TEXT    NOT NULL,
    kind  INTEGER NOT NULL, -- 1 duplicate, 2 rejected
    count INTEGER NOT NULL,
    PRIMARY KEY (queue, kind)
) STRICT, WITHOUT ROWID;

-- The shards of queues in Redis. One whose queue has been empty for long is closed: its row stays,
-- with the number of its last life. One that Redis lost is rebuilt: its unfinished tasks are
-- published again, and its row says so of all of them. A process reads the rows whose `version` is
-- new to it.
CREATE TABLE shards (
    queue              TEXT    NOT NULL,
    shard              INTEGER NOT NULL,
    life               INTEGER NOT NULL,
    closed             INTEGER NOT NULL DEFAULT 0,
    -- Each change of the table raises it (meta.shards_version).
    version            INTEGER NOT NULL DEFAULT 0,
    -- 1: not all are published again; a rebuild that was killed begins anew.
    rebuilding         INTEGER NOT NULL DEFAULT 0,
    rebuilt_generation TEXT    NOT NULL DEFAULT '', -- of the topic; '': never rebuilt
    -- Each of its unfinished tasks that is not in the outbox was published at this place of its
    -- partition or before, or at a later one of its own.
    rebuilt_major      INTEGER NOT NULL DEFAULT 0,
    rebuilt_minor      INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, shard)
) STRICT, WITHOUT ROWID;

CREATE INDEX shards_version ON shards (version);
CREATE INDEX shards_rebuilding ON shards (queue, shard) WHERE rebuilding = 1;

-- The queues of which no worker gets anything. A process reads them again when meta.pauses_version
-- has another value.
CREATE TABLE paused_queues (
    queue TEXT    NOT NULL PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    who   TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

-- The own limits of limit keys, which operators set. A process reads the rows whose version is new
-- to it and tells the shards in Redis. A row that was cleared stays for a day, so that all learn it.
CREATE TABLE limits (
    queue     TEXT    NOT NULL,
    limit_key BLOB    NOT NULL, -- '*': all limit keys of the queue
    at_a_time INTEGER NOT NULL, -- -1: as the queue; 0: nothing starts
    pace      TEXT    NOT NULL, -- such as '10/1m'; '': as the queue
    burst     INTEGER NOT NULL, -- 0: as the queue
    hold_ms   INTEGER NOT NULL, -- nothing starts before; 0: nobody said it
    at_ms     INTEGER NOT NULL,
    who       TEXT    NOT NULL,
    version   INTEGER NOT NULL, -- meta.limits_version at the last change
    cleared   INTEGER NOT NULL,
    PRIMARY KEY (queue, limit_key)
) STRICT, WITHOUT ROWID;

CREATE INDEX limits_version ON limits (version);
CREATE INDEX limits_cleared ON limits (cleared, at_ms);

-- Holds of limit keys that workers reported and that last for 10 s and more. Redis has them, too:
-- a shard that it has lost gets them from here.
CREATE TABLE limit_holds (
    queue      TEXT    NOT NULL,
    limit_hash BLOB    NOT NULL, -- the first 8 bytes of the hash of the limit key
    until_ms   INTEGER NOT NULL, -- nothing starts before; 0: an operator ended it
    PRIMARY KEY (queue, limit_hash)
) STRICT, WITHOUT ROWID;

CREATE INDEX limit_holds_until ON limit_holds (until_ms);

-- The topics of users. Their records are on the server of the bus.
CREATE TABLE topics (
    name       TEXT    NOT NULL PRIMARY KEY,
    partitions INTEGER NOT NULL,
    age_ms     INTEGER NOT NULL, -- how long a record stays
    records    INTEGER NOT NULL, -- how many records stay, in all partitions
    bytes      INTEGER NOT NULL, -- how many bytes stay, in all partitions
    created_ms INTEGER NOT NULL,
    deleting   INTEGER NOT NULL DEFAULT 0, -- 1: somebody has begun to delete it
    attached   INTEGER NOT NULL DEFAULT 0 -- 1: somebody else has made it on Kafka
) STRICT, WITHOUT ROWID;

-- Subscriptions: each turns the records of topics into tasks of a queue. A process reads this table,
-- and adds positions, when meta.feeds_version has another value; changes of topics raise it, too.
CREATE TABLE subscriptions (
    name        TEXT    NOT NULL PRIMARY KEY,
    topic       TEXT    NOT NULL, -- a name, or PREFIX*
    queue       TEXT    NOT NULL,
    start_at    TEXT    NOT NULL, -- as given when it was made
    matching    TEXT    NOT NULL, -- JSON, as Matching::read reads it
    sequence_by INTEGER NOT NULL, -- 0 none, 1 key
    on_dead     INTEGER NOT NULL, -- 0 next, 1 hold
    created_ms  INTEGER NOT NULL,
    version     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- How far each subscription has read each partition, and what became of the records.
CREATE TABLE positions (
    subscription TEXT    NOT NULL,
    topic        TEXT    NOT NULL,
    part         INTEGER NOT NULL, -- the partition
    major        INTEGER NOT NULL, -- the last record that was read; -1: none
    minor        INTEGER NOT NULL,
    appended     INTEGER NOT NULL, -- records appended to the partition up to here; -1: unknown
    replay       INTEGER NOT NULL, -- how often the subscription was sent back
    records_read INTEGER NOT NULL DEFAULT 0,
    duplicates   INTEGER NOT NULL DEFAULT 0,
    filtered     INTEGER NOT NULL DEFAULT 0,
    refused      INTEGER NOT NULL DEFAULT 0,
    skipped      INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (subscription, topic, part)
) STRICT, WITHOUT ROWID;

-- Topologies, as files. A process reads them again when meta.topologies_version has another value.
CREATE TABLE topologies (
    name       TEXT    NOT NULL PRIMARY KEY,
    version    INTEGER NOT NULL, -- how often it was applied
    content    TEXT    NOT NULL, -- the file
    applied_by TEXT    NOT NULL,
    applied_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- What became of the records of feeds outside of taskd, as their reader wrote it a moment ago.
CREATE TABLE feeds (
    name         TEXT    NOT NULL, -- TOPOLOGY.FEED
    source       TEXT    NOT NULL, -- a hash of what it reads: a feed that reads something else has another row
    run          INTEGER NOT NULL, -- when its source was first read, or read again after it lost its data
    trees        INTEGER NOT NULL,
    duplicates   INTEGER NOT NULL,
    refused      INTEGER NOT NULL,
    acknowledged INTEGER NOT NULL,
    acks_pending INTEGER NOT NULL,
    held         TEXT    NOT NULL, -- why it reads nothing
    at_ms        INTEGER NOT NULL, -- when it was last written, or known to be in a file
    PRIMARY KEY (name, source)
) STRICT, WITHOUT ROWID;

-- Records whose trees have ended, until their source has forgotten them.
CREATE TABLE feed_acks (
    feed      TEXT    NOT NULL,
    reference TEXT    NOT NULL, -- RUN:RECORD
    at_ms     INTEGER NOT NULL,
    PRIMARY KEY (feed, reference)
) STRICT, WITHOUT ROWID;

-- Workflows -------------------------------------------------------------------------------------

-- Definitions of workflows. None ever changes.
CREATE TABLE definitions (
    namespace   TEXT    NOT NULL,
    name        TEXT    NOT NULL,
    version     TEXT    NOT NULL,
    hash        TEXT    NOT NULL, -- hex; executions are pinned to it
    content     TEXT    NOT NULL, -- as it was deployed
    documents   TEXT    NOT NULL, -- JSON: what it refers to, by URI
    deployed_by TEXT    NOT NULL,
    deployed_ms INTEGER NOT NULL,
    PRIMARY KEY (namespace, name, version)
) STRICT, WITHOUT ROWID;

-- Executions of workflows, finished ones included until they are removed.
CREATE TABLE executions (
    id          BLOB    NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    given_id    BLOB, -- the id that its caller gave, if one did
    namespace   TEXT    NOT NULL,
    name        TEXT    NOT NULL,
    version     TEXT    NOT NULL,
    hash        TEXT    NOT NULL, -- of its definition
    status      INTEGER NOT NULL, -- 0 pending, 1 running, 2 waiting, 3 completed, 4 faulted, 5 cancelled
    seq         INTEGER NOT NULL, -- how many entries its log has
    batch       INTEGER NOT NULL, -- of the last append, by which a repeat of it is known
    input       BLOB    NOT NULL, -- JSON; empty once the log has it
    summary     BLOB    NOT NULL, -- what readers are shown next to the status
    traceparent TEXT    NOT NULL,
    created_ms  INTEGER NOT NULL,
    updated_ms  INTEGER NOT NULL,
    ended_ms    INTEGER NOT NULL -- 0: it is open
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX executions_given ON executions (given_id);
CREATE INDEX executions_status ON executions (status, id);
CREATE INDEX executions_workflow ON executions (namespace, name, id);
CREATE INDEX executions_workflow_status ON executions (namespace, name, status, id);
CREATE INDEX executions_ended ON executions (ended_ms);

-- The log of each execution.
CREATE TABLE execution_events (
    execution BLOB    NOT NULL,
    seq       INTEGER NOT NULL, -- counts from 1
    entry     BLOB    NOT NULL, -- JSON: an Entry of the machine
    PRIMARY KEY (execution, seq)
) STRICT, WITHOUT ROWID;

-- What came to executions, until an append consumes it. The transaction that ends a step adds its
-- row.
CREATE TABLE execution_inbox (
    execution BLOB    NOT NULL,
    task      BLOB    NOT NULL, -- of the step; zeros: none
    -- The status of the step, as in tasks; 0 the execution was created, 4 it is to be cancelled,
    -- 5 look again, 6 something is left to do.
    happening INTEGER NOT NULL,
    at_ms     INTEGER NOT NULL,
    PRIMARY KEY (execution, task, happening)
) STRICT, WITHOUT ROWID;

CREATE INDEX execution_inbox_at ON execution_inbox (at_ms, execution, task, happening);

-- The timers that executions wait for.
CREATE TABLE execution_timers (
    execution BLOB    NOT NULL,
    number    INTEGER NOT NULL, -- unique in the execution
    due_ms    INTEGER NOT NULL,
    PRIMARY KEY (execution, number)
) STRICT, WITHOUT ROWID;

CREATE INDEX execution_timers_due ON execution_timers (due_ms, execution, number);

-- Changes by operators --------------------------------------------------------------------------

-- The changes that somebody wants of unfinished tasks, until the queue in Redis has them. A
-- watchdog applies the rows that stay. A later wish of the same kind replaces the row, in another
-- turn.
CREATE TABLE changes (
    task_id BLOB    NOT NULL,
    -- 1 cancel, 2 its priority and NUM as in `tasks`, 3 the end of a reservation, 5 a deadline.
    kind    INTEGER NOT NULL,
    turn    INTEGER NOT NULL, -- a random number
    at_ms   INTEGER NOT NULL,
    PRIMARY KEY (task_id, kind)
) STRICT, WITHOUT ROWID;

CREATE INDEX changes_at ON changes (kind, at_ms, task_id);

-- Changes of all tasks of a filter, which the watchdog makes page by page.
CREATE TABLE bulk_changes (
    id         BLOB    NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    what       TEXT    NOT NULL, -- the change, for example 'retry'
    filter     TEXT    NOT NULL, -- JSON: the tasks, all of them inserted before the bulk change
    who        TEXT    NOT NULL,
    scope      TEXT    NOT NULL, -- the queues that its creator reached, as in tokens.queues
    state      INTEGER NOT NULL, -- 0 running, 1 done, 2 stopped, 3 failed
    position   BLOB    NOT NULL, -- the last task that was looked at; '': none
    looked_at  INTEGER NOT NULL,
    matched    INTEGER NOT NULL,
    changed    INTEGER NOT NULL,
    failed     INTEGER NOT NULL,
    last_error TEXT    NOT NULL,
    created_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    -- SHA-256 of the access token that started it: the bulk change stops when it is revoked; '': none.
    token      BLOB    NOT NULL DEFAULT x''
) STRICT, WITHOUT ROWID;

CREATE INDEX bulk_changes_state ON bulk_changes (state, id);

-- Dead letters, so that an operator can list them and send them again. The letter of a dead task
-- has the task's id, and the task's row has the rest. Others have all that they are about in
-- `content`.
CREATE TABLE letters (
    id      BLOB    NOT NULL PRIMARY KEY,
    queue   TEXT    NOT NULL, -- '' for a record
    kind    INTEGER NOT NULL, -- 1 task, 2 discovered task, 3 record, 4 refused task
    at_ms   INTEGER NOT NULL,
    summary BLOB    NOT NULL, -- a DeadLetter of records.proto, without payload, headers and value
    content BLOB    NOT NULL -- the same with them; empty for a dead task
) STRICT;

-- One for each set of filters, with the newest last.
CREATE INDEX letters_at ON letters (at_ms, id);
CREATE INDEX letters_queue ON letters (queue, at_ms, id);
CREATE INDEX letters_kind ON letters (kind, at_ms, id);
CREATE INDEX letters_queue_kind ON letters (queue, kind, at_ms, id);

-- What operators did, by time.
CREATE TABLE acts (
    id     BLOB NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    who    TEXT NOT NULL,
    what   TEXT NOT NULL,
    target TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- What operators did to a task.
CREATE INDEX acts_target ON acts (target, id);

-- Access ----------------------------------------------------------------------------------------

-- Access tokens, as hashes. A process reads them again when meta.tokens_version has another value.
CREATE TABLE tokens (
    hash             BLOB    NOT NULL PRIMARY KEY, -- SHA-256 of the token
    name             TEXT    NOT NULL,
    roles            INTEGER NOT NULL, -- bits: 1 insert, 2 work, 4 read, 8 admin
    queues           TEXT    NOT NULL, -- NAME or PREFIX*, with commas between; '': every queue
    worker           BLOB    NOT NULL, -- '': any
    calls_per_second INTEGER NOT NULL, -- 0: no limit
    created_ms       INTEGER NOT NULL,
    expires_ms       INTEGER NOT NULL -- 0: never
) STRICT;

CREATE UNIQUE INDEX tokens_name ON tokens (name);
