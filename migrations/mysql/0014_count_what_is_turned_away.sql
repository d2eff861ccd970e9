-- What inserts and reports brought and SQL did not store, for the books. The queue '' has the tasks whose queue is not
-- known here. A process adds its numbers once a second, so they cost no insert anything.

CREATE TABLE turned_away (
    queue VARCHAR(64) NOT NULL,
    kind  TINYINT     NOT NULL, -- 1 duplicate, 2 rejected
    count BIGINT      NOT NULL,
    PRIMARY KEY (queue, kind)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
