-- The lease under which a result was reported, so that its repeat can be told from another completion. 0: reported before this was kept.
ALTER TABLE results ADD COLUMN lease_generation INTEGER NOT NULL DEFAULT 0;
ALTER TABLE results ADD COLUMN lease_grant INTEGER NOT NULL DEFAULT 0;
