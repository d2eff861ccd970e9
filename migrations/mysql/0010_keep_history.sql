-- The attempts of a task that failed. Those that were completed are in `results`.

CREATE TABLE history (
    id        BINARY(16)     NOT NULL PRIMARY KEY, -- at_ms in 48 bits, then a hash of the task and the lease
    task_id   BINARY(16)     NOT NULL,
    state     TINYINT        NOT NULL, -- 3 rejected, 4 expired
    leased_ms BIGINT         NOT NULL, -- 0: unknown
    at_ms     BIGINT         NOT NULL,
    attempt   BIGINT         NOT NULL,
    worker    VARBINARY(128) NOT NULL,
    reason    TEXT           NOT NULL,
    KEY history_task (task_id, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- When the lease of a result was given. 0: unknown.
ALTER TABLE results ADD COLUMN leased_ms BIGINT NOT NULL DEFAULT 0;

-- What operators did to a task. The beginning has all of an id.
CREATE INDEX acts_target ON acts (target(64), id);

-- An older taskd refuses tokens with the time of their lease. Where one may run still, nobody makes such tokens for an
-- hour: the time that an update of all processes may take.
INSERT IGNORE INTO meta (name, value)
    SELECT 'lease_times_from', CASE WHEN EXISTS (SELECT 1 FROM shards)
        THEN CAST(UNIX_TIMESTAMP() * 1000 + 3600000 AS CHAR) ELSE '0' END;
