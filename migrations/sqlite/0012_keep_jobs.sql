-- Changes of all tasks of a filter, which the watchdog makes page by page.
CREATE TABLE jobs (
    id         BLOB    NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    what       TEXT    NOT NULL, -- the change, for example 'retry'
    filter     TEXT    NOT NULL, -- JSON: the tasks, all of them inserted before the job
    who        TEXT    NOT NULL,
    scope      TEXT    NOT NULL, -- the queues that its creator reached, as in tokens.queues
    state      INTEGER NOT NULL, -- 0 running, 1 done, 2 stopped, 3 failed
    position   BLOB    NOT NULL, -- the last task that was looked at; '': none
    looked_at  INTEGER NOT NULL,
    matched    INTEGER NOT NULL,
    changed    INTEGER NOT NULL,
    failed     INTEGER NOT NULL,
    last_error TEXT    NOT NULL,
    created_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX jobs_state ON jobs (state, id);
