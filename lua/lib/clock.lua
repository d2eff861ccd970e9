
-- The time of the call.
--
-- ARGV[1]  now (ms), or '' for Redis's own clock; only tests name a time
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
