-- The same tables as in migrations/sqlite. For InnoDB of MySQL 8 and MariaDB 10.6 or later.
-- What is compared bytewise is BINARY or VARBINARY: text compares without trailing spaces, and often
-- without case.

-- The database itself ---------------------------------------------------------------------------

-- Single values of the whole database, by name. `store_id` names the database in Redis and in
-- other servers, so that two databases are never mixed up.
CREATE TABLE meta (
    name  VARCHAR(64)  NOT NULL PRIMARY KEY,
    value VARCHAR(255) NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO meta (name, value) VALUES
    ('store_id', REPLACE(UUID(), '-', '')),
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
-- and pub_generation = ''.
CREATE TABLE tasks (
    id               BINARY(16)      NOT NULL PRIMARY KEY,
    key_hash         BINARY(32)      NOT NULL UNIQUE,
    queue            VARCHAR(64)     NOT NULL,
    shard            BIGINT          NOT NULL,
    task_key         VARBINARY(4096) NOT NULL,
    replicas         BIGINT          NOT NULL,
    priority         TINYINT         NOT NULL,
    max_attempts     BIGINT          NOT NULL,
    lease_ms         BIGINT          NOT NULL,
    not_before_ms    BIGINT          NOT NULL,
    headers          MEDIUMTEXT      NOT NULL, -- JSON: [["name", "value"], …]
    traceparent      TEXT            NOT NULL,
    created_ms       BIGINT          NOT NULL,
    insertion        BIGINT          NOT NULL, -- the batch that inserted the row
    -- 0 unfinished, 1 completed, 2 dead, 3 cancelled.
    status           TINYINT         NOT NULL DEFAULT 0,
    completed        BIGINT          NOT NULL DEFAULT 0, -- workers that have completed it
    attempts         BIGINT          NOT NULL DEFAULT 0,
    reason           MEDIUMTEXT      NOT NULL DEFAULT (''), -- why it is dead
    updated_ms       BIGINT          NOT NULL,
    -- 1: unfinished, published, not in the outbox.
    on_bus           TINYINT         NOT NULL DEFAULT 0,
    -- Where it was published alone: of the topic.
    pub_generation   VARCHAR(255)    NOT NULL DEFAULT '',
    pub_major        BIGINT          NOT NULL DEFAULT 0,
    pub_minor        BIGINT          NOT NULL DEFAULT 0,
    payload          MEDIUMBLOB      NOT NULL,
    -- 1 bytes, 2 text, 3 JSON, 0 nobody said it.
    payload_encoding TINYINT         NOT NULL DEFAULT 0,
    -- How often it was sent again; a death of an earlier epoch does not end it.
    epoch            BIGINT          NOT NULL DEFAULT 0,
    -- Its own, if it has one (`Backoff::packed`).
    backoff          VARBINARY(32)   NOT NULL DEFAULT '',
    -- If it has one; `changes` has a row of kind 5 until it is final.
    deadline_ms      BIGINT          NULL,
    limit_key        VARCHAR(255)    NULL, -- what it shares its limits with, if it has limits
    sequence         VARCHAR(255)    NULL, -- the name of its sequence in the queue, if it is in one
    on_dead          TINYINT         NULL, -- if it dies, the next ones of its sequence: 0 go on, 1 wait
    sequence_place   BIGINT          NULL, -- its place there, once it ended without being completed
    -- meta.era when reports or operators changed it last. A count with a later era saw that.
    era              BIGINT          NOT NULL DEFAULT 0,
    tree             VARBINARY(32)   NULL, -- the tree that it is in, and its subtree behind it; NULL or empty: none
    execution        VARBINARY(16)   NULL, -- the execution that it is a step of; NULL or empty: none
    KEY tasks_on_bus (on_bus, id, queue, shard),
    -- The earliest finished first.
    KEY tasks_finished (status, updated_ms),
    -- Lists of tasks. Ids are in the order of time.
    KEY tasks_queue (queue, status, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What workers reported with completed tasks.
CREATE TABLE results (
    task_id          BINARY(16)     NOT NULL,
    worker           VARBINARY(128) NOT NULL,
    attempt          BIGINT         NOT NULL,
    completed_ms     BIGINT         NOT NULL,
    surplus          TINYINT        NOT NULL, -- 1: the task had been completed without it
    result           MEDIUMBLOB     NOT NULL,
    result_encoding  TINYINT        NOT NULL DEFAULT 0, -- as tasks.payload_encoding
    -- The lease, by which a repeat of the report is known.
    lease_generation BIGINT         NOT NULL DEFAULT 0,
    lease_grant      BIGINT         NOT NULL DEFAULT 0,
    leased_ms        BIGINT         NOT NULL DEFAULT 0, -- when the lease was given; 0: unknown
    PRIMARY KEY (task_id, worker),
    -- Lists of the tasks that a worker has completed.
    KEY results_worker (worker, task_id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Attempts of tasks that failed. Those that were completed are in `results`.
CREATE TABLE history (
    -- 48 bits of at_ms, then a hash of the task and the lease.
    id        BINARY(16)     NOT NULL PRIMARY KEY,
    task_id   BINARY(16)     NOT NULL,
    state     TINYINT        NOT NULL, -- 3 rejected, 4 expired
    leased_ms BIGINT         NOT NULL, -- 0: unknown
    at_ms     BIGINT         NOT NULL,
    attempt   BIGINT         NOT NULL,
    worker    VARBINARY(128) NOT NULL,
    reason    TEXT           NOT NULL,
    KEY history_task (task_id, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Which tasks are new ---------------------------------------------------------------------------

-- The keys of tasks that finished long ago and were removed, so that none is ever new again.
CREATE TABLE seen (
    key_hash BINARY(32) NOT NULL PRIMARY KEY,
    task_id  BINARY(16) NOT NULL,
    status   TINYINT    NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The idempotency keys of inserts, until the end of their windows.
CREATE TABLE idempotency_keys (
    hash        BINARY(32) NOT NULL PRIMARY KEY, -- SHA-256 of the queue and the idempotency key
    task_id     BINARY(16) NOT NULL, -- of the first insert
    fingerprint BINARY(32) NOT NULL, -- SHA-256 of what the task is
    expires_ms  BIGINT     NOT NULL,
    -- 1: the first insert stored the task; 0: its key had a task before.
    created     TINYINT    NOT NULL,
    KEY idempotency_keys_expire (expires_ms)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What goes to the bus --------------------------------------------------------------------------

-- New tasks go to the bus by the batch: tasks.insertion names it, and one row says of all its
-- tasks whether they are published, and where.
CREATE TABLE batches (
    batch      BIGINT       NOT NULL PRIMARY KEY,
    first_id   BINARY(16)   NOT NULL, -- the least and the greatest id of its tasks
    last_id    BINARY(16)   NOT NULL,
    tasks      BIGINT       NOT NULL, -- how many it had
    due_ms     BIGINT       NOT NULL, -- published: never
    -- Of the topic; '': not published, as far as is known.
    generation VARCHAR(255) NOT NULL DEFAULT '',
    places     MEDIUMTEXT   NOT NULL DEFAULT (''), -- JSON: {"partition": [major, minor], …}
    KEY batches_due (due_ms)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Tasks that go to the bus one by one: scheduled ones, and those that came back from their queue.
CREATE TABLE outbox (
    task_id  BINARY(16)  NOT NULL PRIMARY KEY,
    -- 1 parked (its queue had no room), 2 scheduled, 3 missing in its queue, 4 crowded (enough of
    -- its limit key are in Redis), 5 behind another task of its sequence.
    state    TINYINT     NOT NULL,
    queue    VARCHAR(64) NOT NULL,
    priority TINYINT     NOT NULL,
    due_ms   BIGINT      NOT NULL, -- parked, crowded, behind: never
    -- A random number each time it comes back: what was published before is not this row.
    turn     BIGINT      NOT NULL,
    -- Its weight, so that a page can be cut before its tasks are read.
    bytes    BIGINT      NOT NULL DEFAULT 0,
    limit_hash VARBINARY(8) NOT NULL DEFAULT '', -- of a crowded one, of its limit key
    sequence_hash VARBINARY(16) NOT NULL DEFAULT '', -- of one that is behind: of its sequence
    place    BIGINT      NOT NULL DEFAULT 0, -- of one that is behind: the lowest goes next
    KEY outbox_due (due_ms, task_id),
    KEY outbox_parked (state, queue, priority, task_id),
    KEY outbox_crowded (state, queue, limit_hash, priority, task_id),
    KEY outbox_behind (state, sequence_hash, place, task_id)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Sequences with an unfinished task, or with a dead one that holds the others up. The head is the
-- one that may go to the bus; the others wait in the outbox.
CREATE TABLE sequences (
    hash       BINARY(16)  NOT NULL PRIMARY KEY, -- the first bytes of SHA-256 of queue and name
    queue      VARCHAR(64) NOT NULL,
    head       BINARY(16)  NOT NULL, -- a task
    place      BIGINT      NOT NULL, -- of the head
    waiting_tasks BIGINT   NOT NULL, -- how many are behind it
    last_place BIGINT      NOT NULL -- the highest that was given
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Trees: a task, its root, and all that is discovered from it. The transaction that changes the
-- status of a task changes the counts of its tree.
CREATE TABLE trees (
    id          BINARY(16)  NOT NULL PRIMARY KEY, -- of its root
    queue       VARCHAR(64) NOT NULL, -- of its root
    state       TINYINT     NOT NULL, -- 0 open, 1 done, 2 failed
    epoch       BIGINT      NOT NULL, -- how often it was opened again after an end
    open_tasks  BIGINT      NOT NULL, -- unfinished
    held_tasks  BIGINT      NOT NULL, -- dead ones that keep it open
    tasks       BIGINT      NOT NULL, -- all that were ever added
    dead        BIGINT      NOT NULL, -- and not sent again
    cancelled   BIGINT      NOT NULL, -- and not sent again
    letters     BIGINT      NOT NULL, -- discovered tasks that became letters, and were not sent again
    late        BIGINT      NOT NULL, -- surplus reports, and outputs to joins of no subtree
    joins       BIGINT      NOT NULL, -- subtrees that joins wait for
    cancelling  TINYINT     NOT NULL, -- 1: nothing is added any more
    on_dead     TINYINT     NOT NULL, -- what a dead task means: 0 it counts, 1 nothing, 2 it holds the tree
    deadline_ms BIGINT      NOT NULL, -- 0: none
    then_task   TEXT        NOT NULL, -- JSON: the task of its end; '': none
    opened_ms   BIGINT      NOT NULL,
    ended_ms    BIGINT      NOT NULL, -- 0: it is open
    feed        VARCHAR(64) NOT NULL, -- the feed that is told of its end; '': none
    reference   VARCHAR(64) NOT NULL, -- of the feed's record
    KEY trees_state (state, id),
    KEY trees_queue (queue, id),
    KEY trees_queue_state (queue, state, id),
    KEY trees_ended (state, ended_ms)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The tasks of each tree, until they are removed. An index on tasks.tree would have an entry for
-- each task without a tree.
CREATE TABLE tree_tasks (
    tree BINARY(16) NOT NULL,
    task BINARY(16) NOT NULL,
    PRIMARY KEY (tree, task)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Subtrees: what came out of one task of a fork, until its join has all of it. The row of the tree
-- is the lock.
CREATE TABLE subtrees (
    id         BINARY(16)     NOT NULL PRIMARY KEY,
    tree       BINARY(16)     NOT NULL,
    path       VARBINARY(512) NOT NULL, -- the subtrees around it, outermost first
    fork       BINARY(16)     NOT NULL, -- a task
    open_tasks BIGINT         NOT NULL, -- unfinished
    held_tasks BIGINT         NOT NULL, -- dead ones that keep it open
    children   BIGINT         NOT NULL, -- subtrees within it
    parts      BIGINT         NOT NULL, -- all that came, stored or not
    part_bytes BIGINT         NOT NULL, -- theirs, roughly
    join_task  TEXT           NOT NULL, -- JSON: the task that it becomes
    KEY subtrees_tree (tree)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The outputs that joins wait for the last of, and the tasks of their forks.
CREATE TABLE parts (
    subtree  BINARY(16)      NOT NULL,
    task     BINARY(16)      NOT NULL, -- which sent it
    place    BIGINT          NOT NULL, -- in its report; -1: it is the task of the fork itself
    stage    VARCHAR(64)     NOT NULL,
    port     VARCHAR(64)     NOT NULL,
    part_key VARBINARY(4096) NOT NULL,
    encoding TINYINT         NOT NULL, -- as in tasks
    payload  LONGBLOB        NOT NULL,
    PRIMARY KEY (subtree, task, place)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Events of queues with `events = true`, until they are on the topic: a row for each transaction,
-- or for a part of one. A later change of a task has a later number, and no number comes twice.
CREATE TABLE kept_events (
    number  BIGINT     NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at_ms   BIGINT     NOT NULL, -- when the first of them happened
    records MEDIUMBLOB NOT NULL -- a KeptEvents of records.proto
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Queues ----------------------------------------------------------------------------------------

-- How many tasks a queue has in each status.
CREATE TABLE queue_counts (
    queue      VARCHAR(64) NOT NULL,
    status     TINYINT     NOT NULL,
    count      BIGINT      NOT NULL,
    unfinished TINYINT AS (CASE WHEN status = 0 AND count <> 0 THEN 1 END) VIRTUAL,
    PRIMARY KEY (queue, status),
    -- The queues that have unfinished tasks, however many names there ever were.
    KEY queue_counts_unfinished (unfinished, queue)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What inserts and reports brought and SQL did not store, for the books. The queue '' has the
-- tasks whose queue is not known here. A process adds its numbers once a second, so they cost no
-- insert anything.
CREATE TABLE turned_away (
    queue VARCHAR(64) NOT NULL,
    kind  TINYINT     NOT NULL, -- 1 duplicate, 2 rejected
    count BIGINT      NOT NULL,
    PRIMARY KEY (queue, kind)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The shards of queues in Redis. One whose queue has been empty for long is closed: its row stays,
-- with the number of its last life. One that Redis lost is rebuilt: its unfinished tasks are
-- published again, and its row says so of all of them. A process reads the rows whose `version` is
-- new to it.
CREATE TABLE shards (
    queue              VARCHAR(64)  NOT NULL,
    shard              BIGINT       NOT NULL,
    life               BIGINT       NOT NULL,
    closed             TINYINT      NOT NULL DEFAULT 0,
    -- Each change of the table raises it (meta.shards_version).
    version            BIGINT       NOT NULL DEFAULT 0,
    -- 1: not all are published again; a rebuild that was killed begins anew.
    rebuilding         TINYINT      NOT NULL DEFAULT 0,
    rebuilt_generation VARCHAR(255) NOT NULL DEFAULT '', -- of the topic; '': never rebuilt
    -- Each of its unfinished tasks that is not in the outbox was published at this place of its
    -- partition or before, or at a later one of its own.
    rebuilt_major      BIGINT       NOT NULL DEFAULT 0,
    rebuilt_minor      BIGINT       NOT NULL DEFAULT 0,
    PRIMARY KEY (queue, shard),
    KEY shards_version (version),
    KEY shards_rebuilding (rebuilding)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The queues of which no worker gets anything. A process reads them again when meta.pauses_version
-- has another value.
CREATE TABLE paused_queues (
    queue VARCHAR(64)  NOT NULL PRIMARY KEY,
    at_ms BIGINT       NOT NULL,
    who   VARCHAR(255) NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The own limits of limit keys, which operators set. A process reads the rows whose version is new
-- to it and tells the shards in Redis. A row that was cleared stays for a day, so that all learn it.
CREATE TABLE limits (
    queue     VARCHAR(64)    NOT NULL,
    limit_key VARBINARY(255) NOT NULL, -- '*': all limit keys of the queue
    at_a_time BIGINT         NOT NULL, -- -1: as the queue; 0: nothing starts
    pace      VARCHAR(64)    NOT NULL, -- such as '10/1m'; '': as the queue
    burst     BIGINT         NOT NULL, -- 0: as the queue
    hold_ms   BIGINT         NOT NULL, -- nothing starts before; 0: nobody said it
    at_ms     BIGINT         NOT NULL,
    who       VARCHAR(255)   NOT NULL,
    version   BIGINT         NOT NULL, -- meta.limits_version at the last change
    cleared   BIGINT         NOT NULL,
    PRIMARY KEY (queue, limit_key),
    KEY limits_version (version),
    KEY limits_cleared (cleared, at_ms)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Holds of limit keys that workers reported and that last for 10 s and more. Redis has them, too:
-- a shard that it has lost gets them from here.
CREATE TABLE limit_holds (
    queue      VARCHAR(64)  NOT NULL,
    limit_hash VARBINARY(8) NOT NULL, -- the first 8 bytes of the hash of the limit key
    until_ms   BIGINT       NOT NULL, -- nothing starts before; 0: an operator ended it
    PRIMARY KEY (queue, limit_hash),
    KEY limit_holds_until (until_ms)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The topics of users. Their records are on the server of the bus.
CREATE TABLE topics (
    name       VARCHAR(64) NOT NULL PRIMARY KEY,
    partitions BIGINT NOT NULL,
    age_ms     BIGINT NOT NULL, -- how long a record stays
    records    BIGINT NOT NULL, -- how many records stay, in all partitions
    bytes      BIGINT NOT NULL, -- how many bytes stay, in all partitions
    created_ms BIGINT NOT NULL,
    deleting   BIGINT NOT NULL DEFAULT 0, -- 1: somebody has begun to delete it
    attached   BIGINT NOT NULL DEFAULT 0 -- 1: somebody else has made it on Kafka
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Subscriptions: each turns the records of topics into tasks of a queue. A process reads this table,
-- and adds positions, when meta.feeds_version has another value; changes of topics raise it, too.
CREATE TABLE subscriptions (
    name        VARCHAR(64)  NOT NULL PRIMARY KEY,
    topic       VARCHAR(65)  NOT NULL, -- a name, or PREFIX*
    queue       VARCHAR(64)  NOT NULL,
    start_at    TEXT         NOT NULL, -- as given when it was made
    matching    MEDIUMTEXT   NOT NULL, -- JSON, as Matching::read reads it
    sequence_by TINYINT      NOT NULL, -- 0 none, 1 key
    on_dead     TINYINT      NOT NULL, -- 0 next, 1 hold
    created_ms  BIGINT       NOT NULL,
    version     BIGINT       NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- How far each subscription has read each partition, and what became of the records.
CREATE TABLE positions (
    subscription VARCHAR(64) NOT NULL,
    topic        VARCHAR(64) NOT NULL,
    part         BIGINT NOT NULL, -- the partition
    major        BIGINT NOT NULL, -- the last record that was read; -1: none
    minor        BIGINT NOT NULL,
    appended     BIGINT NOT NULL, -- records appended to the partition up to here; -1: unknown
    replay       BIGINT NOT NULL, -- how often the subscription was sent back
    records_read BIGINT NOT NULL DEFAULT 0,
    duplicates   BIGINT NOT NULL DEFAULT 0,
    filtered     BIGINT NOT NULL DEFAULT 0,
    refused      BIGINT NOT NULL DEFAULT 0,
    skipped      BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (subscription, topic, part)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Topologies, as files. A process reads them again when meta.topologies_version has another value.
CREATE TABLE topologies (
    name       VARCHAR(64)  NOT NULL PRIMARY KEY,
    version    BIGINT       NOT NULL, -- how often it was applied
    content    MEDIUMTEXT   NOT NULL, -- the file
    applied_by VARCHAR(255) NOT NULL,
    applied_ms BIGINT       NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What became of the records of feeds outside of taskd, as their reader wrote it a moment ago.
CREATE TABLE feeds (
    name         VARCHAR(64) NOT NULL, -- TOPOLOGY.FEED
    source       VARCHAR(64) NOT NULL, -- a hash of what it reads: a feed that reads something else has another row
    run          BIGINT NOT NULL, -- when its source was first read, or read again after it lost its data
    trees        BIGINT NOT NULL,
    duplicates   BIGINT NOT NULL,
    refused      BIGINT NOT NULL,
    acknowledged BIGINT NOT NULL,
    acks_pending BIGINT NOT NULL,
    held         TEXT   NOT NULL, -- why it reads nothing
    at_ms        BIGINT NOT NULL, -- when it was last written, or known to be in a file
    PRIMARY KEY (name, source)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Records whose trees have ended, until their source has forgotten them.
CREATE TABLE feed_acks (
    feed      VARCHAR(64) NOT NULL,
    reference VARCHAR(64) NOT NULL, -- RUN:RECORD
    at_ms     BIGINT NOT NULL,
    PRIMARY KEY (feed, reference)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Workflows -------------------------------------------------------------------------------------

-- Definitions of workflows. None ever changes.
CREATE TABLE definitions (
    namespace   VARCHAR(64)  NOT NULL,
    name        VARCHAR(64)  NOT NULL,
    version     VARCHAR(64)  NOT NULL,
    hash        CHAR(64)     NOT NULL, -- hex; executions are pinned to it
    content     MEDIUMTEXT   NOT NULL, -- as it was deployed
    documents   LONGTEXT     NOT NULL, -- JSON: what it refers to, by URI
    deployed_by VARCHAR(255) NOT NULL,
    deployed_ms BIGINT       NOT NULL,
    PRIMARY KEY (namespace, name, version)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Executions of workflows, finished ones included until they are removed.
CREATE TABLE executions (
    id          BINARY(16)     NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    given_id    VARBINARY(128) NULL, -- the id that its caller gave, if one did
    namespace   VARCHAR(64)    NOT NULL,
    name        VARCHAR(64)    NOT NULL,
    version     VARCHAR(64)    NOT NULL,
    hash        CHAR(64)       NOT NULL, -- of its definition
    -- 0 pending, 1 running, 2 waiting, 3 completed, 4 faulted, 5 cancelled.
    status      TINYINT        NOT NULL,
    seq         BIGINT         NOT NULL, -- how many entries its log has
    batch       BIGINT         NOT NULL, -- of the last append, by which a repeat of it is known
    input       MEDIUMBLOB     NOT NULL, -- JSON; empty once the log has it
    summary     MEDIUMBLOB     NOT NULL, -- what readers are shown next to the status
    traceparent VARCHAR(255)   NOT NULL,
    created_ms  BIGINT         NOT NULL,
    updated_ms  BIGINT         NOT NULL,
    ended_ms    BIGINT         NOT NULL, -- 0: it is open
    UNIQUE KEY executions_given (given_id),
    KEY executions_status (status, id),
    KEY executions_workflow (namespace, name, id),
    KEY executions_workflow_status (namespace, name, status, id),
    KEY executions_ended (ended_ms)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The log of each execution.
CREATE TABLE execution_events (
    execution BINARY(16) NOT NULL,
    seq       BIGINT     NOT NULL, -- counts from 1
    entry     MEDIUMBLOB NOT NULL, -- JSON: an Entry of the machine
    PRIMARY KEY (execution, seq)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What came to executions, until an append consumes it. The transaction that ends a step adds its
-- row.
CREATE TABLE execution_inbox (
    execution BINARY(16) NOT NULL,
    task      BINARY(16) NOT NULL, -- of the step; zeros: none
    -- The status of the step, as in tasks; 0 the execution was created, 4 it is to be cancelled,
    -- 5 look again, 6 something is left to do.
    happening TINYINT    NOT NULL,
    at_ms     BIGINT     NOT NULL,
    PRIMARY KEY (execution, task, happening),
    KEY execution_inbox_at (at_ms, execution, task, happening)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The timers that executions wait for.
CREATE TABLE execution_timers (
    execution BINARY(16) NOT NULL,
    number    BIGINT     NOT NULL, -- unique in the execution
    due_ms    BIGINT     NOT NULL,
    PRIMARY KEY (execution, number),
    KEY execution_timers_due (due_ms, execution, number)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Changes by operators --------------------------------------------------------------------------

-- The changes that somebody wants of unfinished tasks, until the queue in Redis has them. A
-- watchdog applies the rows that stay. A later wish of the same kind replaces the row, in another
-- turn.
CREATE TABLE changes (
    task_id BINARY(16) NOT NULL,
    -- 1 cancel, 2 its priority and NUM as in `tasks`, 3 the end of a reservation, 5 a deadline.
    kind    TINYINT    NOT NULL,
    turn    BIGINT     NOT NULL, -- a random number
    at_ms   BIGINT     NOT NULL,
    PRIMARY KEY (task_id, kind),
    KEY changes_at (kind, at_ms, task_id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Changes of all tasks of a filter, which the watchdog makes page by page.
CREATE TABLE bulk_changes (
    id         BINARY(16)    NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    what       VARCHAR(255)  NOT NULL, -- the change, for example 'retry'
    filter     MEDIUMTEXT    NOT NULL, -- JSON: the tasks, all of them inserted before the bulk change
    who        VARCHAR(255)  NOT NULL,
    scope      MEDIUMTEXT    NOT NULL, -- the queues that its creator reached, as in tokens.queues
    state      TINYINT       NOT NULL, -- 0 running, 1 done, 2 stopped, 3 failed
    position   VARBINARY(16) NOT NULL, -- the last task that was looked at; '': none
    looked_at  BIGINT        NOT NULL,
    matched    BIGINT        NOT NULL,
    changed    BIGINT        NOT NULL,
    failed     BIGINT        NOT NULL,
    last_error TEXT          NOT NULL,
    created_ms BIGINT        NOT NULL,
    updated_ms BIGINT        NOT NULL,
    -- SHA-256 of the access token that started it: the bulk change stops when it is revoked; '': none.
    token      VARBINARY(32) NOT NULL DEFAULT '',
    KEY bulk_changes_state (state, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Dead letters, so that an operator can list them and send them again. The letter of a dead task
-- has the task's id, and the task's row has the rest. Others have all that they are about in
-- `content`.
CREATE TABLE letters (
    id      BINARY(16)  NOT NULL PRIMARY KEY,
    queue   VARCHAR(64) NOT NULL, -- '' for a record
    kind    TINYINT     NOT NULL, -- 1 task, 2 discovered task, 3 record, 4 refused task
    at_ms   BIGINT      NOT NULL,
    -- A DeadLetter of records.proto, without payload, headers and value.
    summary MEDIUMBLOB  NOT NULL,
    content MEDIUMBLOB  NOT NULL, -- the same with them; empty for a dead task
    -- One for each set of filters, with the newest last.
    KEY letters_at (at_ms, id),
    KEY letters_queue (queue, at_ms, id),
    KEY letters_kind (kind, at_ms, id),
    KEY letters_queue_kind (queue, kind, at_ms, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What operators did, by time.
CREATE TABLE acts (
    id     BINARY(16)    NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    who    VARCHAR(255)  NOT NULL,
    what   VARCHAR(64)   NOT NULL,
    target VARCHAR(1024) NOT NULL,
    -- What operators did to a task. The beginning has all of an id.
    KEY acts_target (target(64), id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Access ----------------------------------------------------------------------------------------

-- Access tokens, as hashes. A process reads them again when meta.tokens_version has another value.
CREATE TABLE tokens (
    hash             BINARY(32)     NOT NULL PRIMARY KEY, -- SHA-256 of the token
    name             VARCHAR(64)    NOT NULL,
    roles            BIGINT         NOT NULL, -- bits: 1 insert, 2 work, 4 read, 8 admin
    -- NAME or PREFIX*, with commas between; '': every queue.
    queues           VARCHAR(4096)  NOT NULL,
    worker           VARBINARY(128) NOT NULL, -- '': any
    calls_per_second BIGINT         NOT NULL, -- 0: no limit
    created_ms       BIGINT         NOT NULL,
    expires_ms       BIGINT         NOT NULL, -- 0: never
    UNIQUE KEY tokens_name (name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
