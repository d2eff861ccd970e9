-- New tasks go to the bus by the batch: tasks.insertion names it, and one row here says of all its tasks whether they
-- are published, and where. A task is in its batch while tasks.on_bus = 1 (unfinished, not in the outbox) and
-- tasks.pub_generation = '' (no place of its own).

CREATE TABLE batches (
    batch      BIGINT       NOT NULL PRIMARY KEY,
    first_id   BINARY(16)   NOT NULL, -- the least and the greatest id of its tasks
    last_id    BINARY(16)   NOT NULL,
    tasks      BIGINT       NOT NULL, -- how many it had
    due_ms     BIGINT       NOT NULL, -- published: never
    generation VARCHAR(255) NOT NULL DEFAULT '', -- of the topic; '': not published, as far as is known
    places     MEDIUMTEXT   NOT NULL DEFAULT (''), -- JSON: {"partition": [major, minor], …}
    KEY batches_due (due_ms)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
