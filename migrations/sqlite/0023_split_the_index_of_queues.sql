-- An index of a queue's tasks for each status: a task that is completed leaves one and is added at the end of another,
-- which costs less than moving it within one (ADR 60).

DROP INDEX tasks_queue;
CREATE INDEX tasks_unfinished ON tasks (queue, id) WHERE status = 0;
CREATE INDEX tasks_completed ON tasks (queue, id) WHERE status = 1;
CREATE INDEX tasks_given_up ON tasks (queue, status, id) WHERE status > 1; -- dead, cancelled

-- A taskd that does not know them could list no queue.
UPDATE meta SET value = '23' WHERE name = 'lowest_schema';
