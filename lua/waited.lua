-- Writes a key that no one reads, right before a WAIT. Redis waits for the last write of the same
-- connection, and a call that only repeats the write of another connection has none of its own.
--
-- KEYS[1] -> <p>:{…}:waited   string, gone after a minute
return redis.call('SET', KEYS[1], '', 'PX', 60000)
