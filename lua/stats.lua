-- How the shard stands. Changes nothing.
--
-- Returns {open tasks, leases, waiting for their time, live tasks, bytes of waiting bodies, outbox entries, final records,
--          creation time (ms) of the oldest task at a tail or -1, elements ahead of the foremost worker}
local meta = redis.call('HMGET', META, 'open', 'live', 'bytes')
local oldest, ahead = -1, 0
for lane = 1, 6 do
  local length = redis.call('LLEN', T(lane))
  if length > 0 then
    local gone = tonumber(redis.call('GET', C(lane)) or 0)
    local front = tonumber(redis.call('HGET', META, 'f' .. lane) or 0)
    ahead = ahead + math.min(length, length + gone - front)
    -- A few spent elements may stand before the oldest that is open.
    local elements = redis.call('LRANGE', T(lane), -32, -1)
    for k = #elements, 1, -1 do
      local id = id_of(elements[k])
      local record = redis.call('HGET', REC, id)
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
return {tonumber(meta[1] or 0), redis.call('ZCARD', LEASE), redis.call('ZCARD', DELAY), tonumber(meta[2] or 0), tonumber(meta[3] or 0),
  redis.call('XLEN', OUT), redis.call('LLEN', FINAL), oldest, ahead}
