-- A shard that Redis lost is rebuilt: its unfinished tasks are published again, and one row says so of all of them.
-- rebuilding = 1: not all are published again, so that a rebuild that was killed begins anew. rebuilt_…: every
-- unfinished task of the shard that is not in the outbox is at or before this place of its partition, or at a later one
-- of its own. '': never rebuilt.

ALTER TABLE shards ADD COLUMN rebuilding TINYINT NOT NULL DEFAULT 0;
ALTER TABLE shards ADD COLUMN rebuilt_generation VARCHAR(255) NOT NULL DEFAULT ''; -- of the topic
ALTER TABLE shards ADD COLUMN rebuilt_major BIGINT NOT NULL DEFAULT 0;
ALTER TABLE shards ADD COLUMN rebuilt_minor BIGINT NOT NULL DEFAULT 0;
ALTER TABLE shards ADD KEY shards_rebuilding (rebuilding);
