-- Hands out long holds of limit keys that SQL does not have yet, and forgets those that it has now (lib/limits.lua).
--
-- ARGV[2] the last call whose holds are in SQL, 0 unknown   ARGV[3] calls at most
-- Returns {the last call of these, limit keys (8 bytes), each with the end of its hold (ms, 8 bytes; 0: it has none)}
local counters = redis.call('HMGET', COUNTERS, 'holds', 'holds_kept')
local last, kept, stored = tonumber(counters[1] or 0), tonumber(counters[2] or 0), tonumber(ARGV[2])
local function fields(to)
  local names = {}
  for call = kept + 1, to do names[#names + 1] = string.format('holds %d', call) end
  return names
end
if stored > kept and stored <= last then
  redis.call('HDEL', LINES, unpack(fields(stored)))
  redis.call('HSET', COUNTERS, 'holds_kept', stored)
  kept = stored
end
local to, holds = math.min(last, kept + tonumber(ARGV[3])), {}
for _, text in ipairs(to > kept and redis.call('HMGET', LINES, unpack(fields(to))) or {}) do
  -- One that is not there was lost with Redis's last writes.
  if text then holds[#holds + 1] = text end
end
return {to, table.concat(holds)}
