-- SQLite has numbered its tasks here. In MySQL rows lie in the order of the primary key.

DO 0;
