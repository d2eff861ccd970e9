-- What inserts and reports brought and SQL did not store, for the books. The queue '' has the tasks whose queue is not
-- known here. A process adds its numbers once a second, so they cost no insert anything.

CREATE TABLE turned_away (
    queue TEXT    NOT NULL,
    kind  INTEGER NOT NULL, -- 1 duplicate, 2 rejected
    count INTEGER NOT NULL,
    PRIMARY KEY (queue, kind)
) STRICT, WITHOUT ROWID;
