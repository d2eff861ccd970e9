-- Raises the epoch of a partition of `pipeline`.
--
-- KEYS[1] -> <p>:epochs   hash: partition -> epoch
-- ARGV[1] partition   ARGV[2] by how much
-- Returns the epoch
return redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
