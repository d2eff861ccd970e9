-- Walks over the tasks on the bus go by queue: the index of unfinished tasks, which each task is in anyway, says which are
-- on the bus, and no other index has to (ADR 61).

DROP INDEX tasks_on_bus;
DROP INDEX tasks_unfinished;
ALTER TABLE tasks DROP COLUMN id_group;
CREATE INDEX tasks_unfinished ON tasks (queue, id, on_bus, shard) WHERE status = 0;

-- A taskd that does not know this could insert no task.
UPDATE meta SET value = '24' WHERE name = 'lowest_schema';
