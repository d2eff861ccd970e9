-- A process with allotments lives on. It learns whether Redis took it for alive: if not, its allotments may be gone,
-- and it writes them again.
--
-- KEYS[1] -> <p>:{sessions:<n>}:processes   zset: process with streams -> until when it lives (ms)
-- ARGV[2] process   ARGV[3] how long it lives from now on (ms)
-- Returns 1 if it was not alive
local lived = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[2]) or 0)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[2])
return lived > now and 0 or 1
