-- New tasks go to the bus by the batch: tasks.insertion names it, and one row here says of all its tasks whether they
-- are published, and where. A task is in its batch while tasks.on_bus = 1 (unfinished, not in the outbox) and
-- tasks.pub_generation = '' (no place of its own).

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
