-- The Redis that holds the tasks of this database, and how often its processes have renewed that (ADR 59).

INSERT INTO meta (name, value) VALUES ('redis', '');
