-- What payloads and results are: 1 bytes, 2 text, 3 JSON. 0: stored before this was kept.
ALTER TABLE tasks ADD COLUMN payload_encoding INTEGER NOT NULL DEFAULT 0;
ALTER TABLE results ADD COLUMN result_encoding INTEGER NOT NULL DEFAULT 0;
