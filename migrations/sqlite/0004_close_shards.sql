-- A shard whose queue has been empty for long is closed: its row stays, with the number of its last life. A process
-- reads what changed by `version`, a number that every change of the table raises (meta.shards_version).

ALTER TABLE shards ADD COLUMN closed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE shards ADD COLUMN version INTEGER NOT NULL DEFAULT 0;
CREATE INDEX shards_version ON shards (version);
INSERT INTO meta (name, value) VALUES ('shards_version', '0');

-- The queues that have unfinished tasks, however many names there ever were.
CREATE INDEX queue_counts_unfinished ON queue_counts (queue) WHERE status = 0 AND count <> 0;

-- The first schema that a taskd must know to work with this one. A later migration that an older taskd cannot live with
-- raises it.
INSERT INTO meta (name, value) VALUES ('lowest_schema', '4');
