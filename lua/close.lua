-- Closes a shard in which nothing has happened for long: removes all its keys in one step. Does nothing while anything
-- is there: a task, a lease, a record, an entry of the outbox.
--
-- ARGV[2]  for how long nothing must have happened (ms)
-- Returns {-1, generation} closed | {-2, 0} something is there | {ms, 0} how long until it may be closed
for _, key in ipairs({REC, BODY, LEASE, DELAY, FINAL}) do
  if redis.call('EXISTS', key) == 1 then return {-2, 0} end
end
if redis.call('XLEN', OUT) > 0 then return {-2, 0} end

-- Whatever happened in the shard has moved the stored offset, or the number of grants.
local lasts = tonumber(ARGV[2])
local mark = (redis.call('HGET', META, 'n') or '0') .. ' ' .. (redis.call('GET', OFFSET) or '')
local since, seen = string.match(redis.call('HGET', META, 'idle') or '', '^(%d+) (.*)$')
since = tonumber(since)
-- A time to come was written before the clock stepped back.
if seen ~= mark or since > now then
  redis.call('HSET', META, 'idle', string.format('%.0f %s', now, mark))
  return {lasts, 0}
end
if now - since < lasts then return {lasts - (now - since), 0} end
redis.call('UNLINK', unpack(KEYS))
return {-1, tonumber(generation)}
