-- The attempts of a task that failed. Those that were completed are in `results`.

CREATE TABLE history (
    id        BLOB    NOT NULL PRIMARY KEY, -- at_ms in 48 bits, then a hash of the task and the lease
    task_id   BLOB    NOT NULL,
    state     INTEGER NOT NULL, -- 3 rejected, 4 expired
    leased_ms INTEGER NOT NULL, -- 0: unknown
    at_ms     INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    worker    TEXT    NOT NULL,
    reason    TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX history_task ON history (task_id, id);

-- When the lease of a result was given. 0: unknown.
ALTER TABLE results ADD COLUMN leased_ms INTEGER NOT NULL DEFAULT 0;

-- What operators did to a task.
CREATE INDEX acts_target ON acts (target, id);

-- An older taskd refuses tokens with the time of their lease. Where one may run still, nobody makes such tokens for an
-- hour: the time that an update of all processes may take.
INSERT OR IGNORE INTO meta (name, value)
    SELECT 'lease_times_from', CASE WHEN EXISTS (SELECT 1 FROM shards)
        THEN CAST(unixepoch() * 1000 + 3600000 AS TEXT) ELSE '0' END;
