-- Counts what the shard has. Changes nothing.
--
-- Returns {open tasks, leases, waiting for their time, live tasks, bytes of open tasks, outbox entries,
--          final records, creation time (ms) of the oldest task at a tail or -1, elements ahead of the foremost worker, items that
--          wait behind limit keys, limit keys that have anything, limit keys with tasks in SQL}
local counters = redis.call('HMGET', COUNTERS, 'open', 'live', 'open_bytes', 'limited', 'behind')
local oldest, ahead = -1, 0
for lane = 1, 6 do
  local length = redis.call('LLEN', T(lane))
  if length > 0 then
    local gone = tonumber(redis.call('GET', C(lane)) or 0)
    local front = tonumber(redis.call('HGET', COUNTERS, 'front' .. lane) or 0)
    ahead = ahead + math.min(length, length + gone - front)
    -- Spent elements may come before the oldest open one. Only the last 32 elements are checked.
    local elements = redis.call('LRANGE', T(lane), -32, -1)
    for k = #elements, 1, -1 do
      local id = id_of(elements[k])
      local record = record_of(id)
      local t = record and load(record)
      if t and left(t) > 0 and is_offer(t, elements[k]) then
        -- The first 48 bits of a UUIDv7 are its time.
        local high, low = struct.unpack('>I4I2', id)
        local created = high * 65536 + low
        if oldest < 0 or created < oldest then oldest = created end
        break
      end
    end
  end
end
local limit_keys, crowded_keys = 0, 0
if counters[4] then
  -- Beside the keys there are the limits of the queue, and own limits with their version.
  local own = redis.call('HGET', LIMITS, 'o')
  local others = 1 + (own and 1 + cmsgpack.unpack(own)[2] + redis.call('HEXISTS', LIMITS, 'o*') or 0)
  limit_keys, crowded_keys = math.max(redis.call('HLEN', LIMITS) - others, 0), redis.call('ZCARD', CROWDED)
end
return {tonumber(counters[1] or 0), redis.call('ZCARD', LEASES), redis.call('ZCARD', DELAYED),
  tonumber(counters[2] or 0), tonumber(counters[3] or 0), redis.call('XLEN', OUTBOX),
  redis.call('LLEN', FINALS), oldest, ahead, tonumber(counters[5] or 0),
  limit_keys, crowded_keys}
