-- The backoff of a task, if it has one of its own (`Backoff::packed`).
ALTER TABLE tasks ADD COLUMN backoff VARBINARY(32) NOT NULL DEFAULT '';
