-- The deadline of a task, if it has one. `changes` has a row of kind 5 for each, until its task is final.
ALTER TABLE tasks ADD COLUMN deadline_ms INTEGER;
