-- Says what there is to do in the shard. Changes nothing.
--
-- ARGV[2] grace time of final records (ms)   ARGV[3] horizon (ms), as in promote   ARGV[4] limits of the queue, as there
-- Returns 0 the shard is empty
--       | {a lease ran out 0|1, a delay is over 0|1, ms until the next of them or -1, elements beyond the open tasks,
--          lanes with pointers, outbox entries, a final record is due 0|1, open tasks, version of own limits (lib/limits.lua)
--          or -1 in a shard without limited tasks, calls with long holds that SQL does not have yet}
local outbox = redis.call('XLEN', OUTBOX)
local counters = redis.call('HMGET', COUNTERS, 'open', 'longest_lease', 'longest_delay', 'limited', 'behind',
  'longest_start', 'holds', 'holds_kept')
local open, longest = tonumber(counters[1] or 0), tonumber(counters[2]) or math.huge
-- Check the other keys only if there are no open tasks, because each key costs time.
if open <= 0 and outbox == 0 then
  local there = redis.call('EXISTS', LEASES, DELAYED, FINALS, UNDELIVERED, RECORDS, BODIES, STARTS, T(1), T(2), T(3), T(4),
    T(5), T(6), P(1), P(2), P(3), P(4), P(5), P(6))
  if there == 0 then return 0 end
end
local function first(zset, longest)
  local at = redis.call('ZRANGE', zset, 0, 0, 'WITHSCORES')[2]
  if not at then return nil end
  local last = redis.call('ZRANGE', zset, -1, -1, 'WITHSCORES')[2]
  -- A deadline farther away than any that a script wrote has to be moved at once.
  if tonumber(last) > now + longest then return 0 end
  -- Some deadlines lie half a millisecond before a whole one.
  return math.max(math.ceil(tonumber(at)) - now, 0)
end
local lease = first(LEASES, longest) or first(UNDELIVERED, longest)
local delay = first(DELAYED, math.max(tonumber(ARGV[3]), tonumber(counters[3]) or 0))
local own_version = -1
if counters[4] then
  local found = redis.call('HMGET', LIMITS, '', 'o')
  local text = found[1]
  own_version = found[2] and cmsgpack.unpack(found[2])[1] or 0
  local start = first(STARTS, tonumber(counters[6] or 0))
  if start and (not delay or start < delay) then delay = start end
  -- Promote takes new limits, and tells all keys.
  local is_new = (ARGV[4] or '') ~= '' and ARGV[4] ~= text
  if is_new or redis.call('HEXISTS', COUNTERS, 'limits_walk') == 1 then delay = 0 end
end
local elements = 0
for lane = 1, 6 do elements = elements + redis.call('LLEN', T(lane)) end
local pointers = redis.call('EXISTS', P(1), P(2), P(3), P(4), P(5), P(6))
local final = redis.call('LINDEX', FINALS, 0)
local record = final and redis.call('HGET', RECORDS, final)
local t = record and load(record)
local settles = final and not (t and not t[PAST] and t[AT] <= now and t[AT] > now - tonumber(ARGV[2]))
local next_ms = math.min(lease or math.huge, delay or math.huge)
return {lease == 0 and 1 or 0, delay == 0 and 1 or 0, next_ms == math.huge and -1 or next_ms,
  math.max(elements - math.max(open - tonumber(counters[5] or 0), 0), 0), pointers, outbox, settles and 1 or 0, math.max(open, 0),
  own_version, tonumber(counters[7] or 0) - tonumber(counters[8] or 0)}
