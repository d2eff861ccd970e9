-- Access tokens, as hashes. A process reads them again when meta.tokens_version has another value.
CREATE TABLE tokens (
    hash             BINARY(32)     NOT NULL PRIMARY KEY, -- SHA-256 of the token
    name             VARCHAR(64)    NOT NULL,
    roles            BIGINT         NOT NULL, -- bits: 1 insert, 2 work, 4 read, 8 admin
    queues           VARCHAR(4096)  NOT NULL, -- NAME or PREFIX*, with commas between; '': every queue
    worker           VARBINARY(128) NOT NULL, -- '': any
    calls_per_second BIGINT         NOT NULL, -- 0: no limit
    created_ms       BIGINT         NOT NULL,
    expires_ms       BIGINT         NOT NULL, -- 0: never
    UNIQUE KEY tokens_name (name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO meta (name, value) VALUES ('tokens_version', '0');

-- What operators did, by time.
CREATE TABLE acts (
    id     BINARY(16)    NOT NULL PRIMARY KEY, -- a UUIDv7: it begins with the time
    who    VARCHAR(255)  NOT NULL,
    what   VARCHAR(64)   NOT NULL,
    target VARCHAR(1024) NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
