-- SQLite has split an index here. MySQL knows no index of a part of a table.

DO 0;
