-- SQLite has lost an index here, which MySQL needs to find the tasks of a batch.

DO 0;
