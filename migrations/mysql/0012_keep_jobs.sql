-- Changes of all tasks of a filter, which the watchdog makes page by page.
CREATE TABLE jobs (
    id         BINARY(16)    NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    what       VARCHAR(255)  NOT NULL, -- the change, for example 'retry'
    filter     MEDIUMTEXT    NOT NULL, -- JSON: the tasks, all of them inserted before the job
    who        VARCHAR(255)  NOT NULL,
    scope      MEDIUMTEXT    NOT NULL, -- the queues that its creator reached, as in tokens.queues
    state      TINYINT       NOT NULL, -- 0 running, 1 done, 2 stopped, 3 failed
    position   VARBINARY(16) NOT NULL, -- the last task that was looked at; '': none
    looked_at  BIGINT        NOT NULL,
    matched    BIGINT        NOT NULL,
    changed    BIGINT        NOT NULL,
    failed     BIGINT        NOT NULL,
    last_error TEXT          NOT NULL,
    created_ms BIGINT        NOT NULL,
    updated_ms BIGINT        NOT NULL,
    KEY jobs_state (state, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
