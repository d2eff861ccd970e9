-- A shard whose queue has been empty for long is closed: its row stays, with the number of its last life. A process
-- reads what changed by `version`, a number that every change of the table raises (meta.shards_version).

ALTER TABLE shards ADD COLUMN closed TINYINT NOT NULL DEFAULT 0;
ALTER TABLE shards ADD COLUMN version BIGINT NOT NULL DEFAULT 0;
ALTER TABLE shards ADD KEY shards_version (version);
INSERT INTO meta (name, value) VALUES ('shards_version', '0');

-- The queues that have unfinished tasks, however many names there ever were.
ALTER TABLE queue_counts ADD COLUMN unfinished TINYINT AS (CASE WHEN status = 0 AND count <> 0 THEN 1 END) VIRTUAL;
ALTER TABLE queue_counts ADD KEY queue_counts_unfinished (unfinished, queue);

-- The first schema that a taskd must know to work with this one. A later migration that an older taskd cannot live with
-- raises it.
INSERT INTO meta (name, value) VALUES ('lowest_schema', '4');
