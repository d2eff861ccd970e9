-- Reads the final records that are older than the grace time, the earliest first. A time in the future comes from a
-- clock that was set back, and becomes now.
--
-- ARGV[2] grace time (ms)   ARGV[3] at most
-- Returns their ids
local before, due, restamped = now - tonumber(ARGV[2]), {}, {}
local ids = redis.call('LRANGE', FINALS, 0, tonumber(ARGV[3]) - 1)
local waits = false
for i, record in ipairs(hmget(RECORDS, ids)) do
  local t = record and load(record)
  if t and t[AT] > now then
    t[AT] = now
    restamped[#restamped + 1] = ids[i]
    restamped[#restamped + 1] = save(t)
  end
  waits = waits or t and t[AT] > before
  if not waits then due[i] = ids[i] end
end
call_all('HSET', RECORDS, restamped)
return due
