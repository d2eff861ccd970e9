-- Reads the final records that are older than the grace time, the earliest first. Changes nothing.
--
-- ARGV[2] grace time (ms)   ARGV[3] at most
-- Returns their ids
local before, due = now - tonumber(ARGV[2]), {}
local ids = redis.call('LRANGE', FINAL, 0, tonumber(ARGV[3]) - 1)
for i, record in ipairs(hmget(REC, ids)) do
  if record and load(record)[AT] > before then break end
  due[i] = ids[i]
end
return due
