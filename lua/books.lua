-- Counts what the shard holds, for the books. Reads only lengths and counters, and changes nothing.
--
-- Returns 0 the shard is empty
--       | {live tasks, open tasks, leases, entries of delayed, outbox entries, final records,
--          elements of lane 1, …, of lane 6, items that wait behind limit keys}
if redis.call('EXISTS', RECORDS, BODIES, LEASES, DELAYED, OUTBOX, FINALS, T(1), T(2), T(3), T(4), T(5), T(6)) == 0 then
  return 0
end
local counters = redis.call('HMGET', COUNTERS, 'live', 'open', 'behind')
local answer = {tonumber(counters[1] or 0), tonumber(counters[2] or 0), redis.call('ZCARD', LEASES),
  redis.call('ZCARD', DELAYED), redis.call('XLEN', OUTBOX), redis.call('LLEN', FINALS)}
for lane = 1, 6 do answer[6 + lane] = redis.call('LLEN', T(lane)) end
answer[13] = tonumber(counters[3] or 0)
return answer
