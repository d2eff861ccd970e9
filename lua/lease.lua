#!lua flags=allow-oom
-- Takes, keeps or gives back the lease on a work that one process at a time does. Has no head: it belongs to no shard.
--
-- KEYS[1] -> <prefix>:lease:<work>   string: the process that has it; expires with it
-- ARGV[1] process   ARGV[2] for how long from now on (ms), 0: gives it back   ARGV[3] now (ms), only in tests
-- Returns 1 the process has it | 0 it has not
local holder, ms = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
-- How far the time of a test is ahead of Redis's clock, by which the key expires.
local ahead = 0
if ARGV[3] then
  local time = redis.call('TIME')
  ahead = tonumber(ARGV[3]) - time[1] * 1000 - math.floor(time[2] / 1000)
end
local left = redis.call('PTTL', KEYS[1]) - ahead
if holder and holder ~= ARGV[1] and (ahead == 0 or left > 0) then
  -- No process asks for so long, so the clock was set back: a key expires at a time of day.
  if ms > 0 and left > ms then redis.call('PEXPIRE', KEYS[1], ms + ahead) end
  return 0
end
if ms > 0 then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ms + ahead)
  return 1
end
redis.call('DEL', KEYS[1])
return 0
