#!lua flags=allow-oom
-- Takes, keeps or gives back a lease on work that one process at a time does. Has no head: it is no shard's.
--
-- KEYS[1] -> <prefix>:lease:<what>   string: who has it; expires with it
-- ARGV[1] process   ARGV[2] for how long from now on (ms), 0: gives it back
-- Returns 1 the process has it | 0 it has not
local holder, ms = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
if holder and holder ~= ARGV[1] then
  -- No process asks for so long, so the clock was set back: a key expires at a time of day.
  if ms > 0 and redis.call('PTTL', KEYS[1]) > ms then redis.call('PEXPIRE', KEYS[1], ms) end
  return 0
end
if ms > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ms)
  return 1
end
redis.call('DEL', KEYS[1])
return 0
