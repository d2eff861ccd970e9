-- The backoff of a task, if it has one of its own (`Backoff::packed`).
ALTER TABLE tasks ADD COLUMN backoff BLOB NOT NULL DEFAULT x'';
