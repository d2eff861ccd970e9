-- Removes allotments of a process that died or stopped, and the process when it has none.
--
-- KEYS[1] -> <p>:{sessions:<n>}:processes            zset: process with streams -> until when it lives (ms)
-- KEYS[2] -> <p>:{sessions:<n>}:workers:<process>    set: the workers of whom the process has an allotment
-- KEYS[3…] -> <p>:{sessions:<n>}:of:<worker>         hash: `p` and process -> allotment
-- ARGV[2] process   ARGV[3…] workers, in the order of their keys
-- Returns how many allotments are left; also 0, without a change, if the process lives
local PROCESSES, WORKERS, process = KEYS[1], KEYS[2], ARGV[2]
if tonumber(redis.call('ZSCORE', PROCESSES, process) or 0) > now then return 0 end
for place = 3, #KEYS do
  redis.call('HDEL', KEYS[place], 'p' .. process)
  redis.call('SREM', WORKERS, ARGV[place])
end
local left = redis.call('SCARD', WORKERS)
if left == 0 then redis.call('ZREM', PROCESSES, process) end
return left
