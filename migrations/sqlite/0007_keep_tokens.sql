-- Access tokens, as hashes. A process reads them again when meta.tokens_version has another value.
CREATE TABLE tokens (
    hash             BLOB    NOT NULL PRIMARY KEY, -- SHA-256 of the token
    name             TEXT    NOT NULL,
    roles            INTEGER NOT NULL, -- bits: 1 insert, 2 work, 4 read, 8 admin
    queues           TEXT    NOT NULL, -- NAME or PREFIX*, with commas between; '': every queue
    worker           BLOB    NOT NULL, -- '': any
    calls_per_second INTEGER NOT NULL, -- 0: no limit
    created_ms       INTEGER NOT NULL,
    expires_ms       INTEGER NOT NULL -- 0: never
) STRICT;

CREATE UNIQUE INDEX tokens_name ON tokens (name);
INSERT INTO meta (name, value) VALUES ('tokens_version', '0');

-- What operators did, by time.
CREATE TABLE acts (
    id     BLOB NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    who    TEXT NOT NULL,
    what   TEXT NOT NULL,
    target TEXT NOT NULL
) STRICT, WITHOUT ROWID;
