-- Closes a shard in which nothing has happened for long: removes all its keys in one step. Changes nothing while the
-- shard has a task, a lease, a record or an entry of the outbox.
--
-- ARGV[2]  for how long nothing must have happened (ms)
-- Returns {-1, generation} closed | {-2, 0} in use | {ms, 0} how long until it may be closed
for _, key in ipairs({RECORDS, BODIES, LEASES, DELAYED, FINALS, LINES, STARTS}) do
  if redis.call('EXISTS', key) == 1 then return {-2, 0} end
end
if redis.call('XLEN', OUTBOX) > 0 then return {-2, 0} end

-- Each task changes the number of grants or, when it is forgotten, the number of forgotten records.
-- One that only passes through the bus changes the stored offset.
local lasts, counters = tonumber(ARGV[2]), redis.call('HMGET', COUNTERS, 'grants', 'forgets', 'idle_since')
local mark = (counters[1] or 0) .. ' ' .. (counters[2] or 0) .. ' ' .. (redis.call('GET', OFFSET) or '')
local since, seen = string.match(counters[3] or '', '^(%d+) (.*)$')
since = tonumber(since)
-- A time in the future was written before the clock stepped back.
if seen ~= mark or since > now then
  redis.call('HSET', COUNTERS, 'idle_since', string.format('%.0f %s', now, mark))
  return {lasts, 0}
end
if now - since < lasts then return {lasts - (now - since), 0} end
redis.call('UNLINK', unpack(KEYS))
return {-1, tonumber(generation)}
