-- Takes, keeps or gives back a lease on work that one process at a time does. Has no head: it is no shard's.
--
-- KEYS[1] -> <prefix>:lease:<what>   string: '<until, ms> <process>'; expires with it
-- ARGV[1] process   ARGV[2] for how long from now on (ms), 0: gives it back   ARGV[3] now (ms), or '' for Redis's own clock; tests set it
-- Returns 1 the process has it | 0 it has not
local now = tonumber(ARGV[3])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local ms = tonumber(ARGV[2])
local until_ms, holder = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (.*)$')
if ms == 0 then
  if holder == ARGV[1] then redis.call('DEL', KEYS[1]) end
  return 0
end
-- A time farther away than anybody writes comes from a clock that was set back.
until_ms = tonumber(until_ms) or 0
if until_ms > now and until_ms <= now + ms and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], string.format('%.0f %s', now + ms, ARGV[1]), 'PX', ms)
return 1
