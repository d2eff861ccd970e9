-- The SHA-256 of the access token that started a job: the job stops when the token is revoked. '': there was none.
ALTER TABLE jobs ADD COLUMN token BLOB NOT NULL DEFAULT x'';
