-- Returns the name of this Redis, and gives it one if it has none.
--
-- KEYS[1] -> <p>:redis-name   string: the name
-- ARGV[1] the name for a Redis that has none
-- Returns the name
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
