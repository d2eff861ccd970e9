-- Drops the filters of all queues by beginning a new era.
--
-- KEYS[1] -> <p>:{filter}:era   string   KEYS[2] -> <p>:{filter}:stored   list
-- ARGV[1] the era that the caller found wrong
-- Returns 1 dropped | 0 another process was faster: nothing was changed
if (redis.call('GET', KEYS[1]) or '0') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[2])
redis.call('INCR', KEYS[1])
return 1
