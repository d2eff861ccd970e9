-- SQLite has lost its unique index of keys here. In MySQL it stays: any number of processes meet in it.

DO 0;
