-- Keeps lanes short. Drops spent elements at the tail. If spent elements outnumber the open tasks,
-- it also moves live elements that are stuck at the tail to the head, so that the spent ones after
-- them can be dropped. Of several elements that offer one task, one is moved. Workers that had
-- passed a moved element see it again, and its record refuses them. Drops pointers that the tail
-- has overtaken, and some at random if there are too many.
--
-- ARGV[2] elements per lane to check, at most
-- Returns {how many elements were dropped or moved, how many pointers were dropped}
local most = tonumber(ARGV[2])
-- How many pointers of a lane to keep, and how many of the others one call drops at most.
local POINTERS, AT_ONCE = 10000, 1000
local lengths, total = {}, 0
for lane = 1, 6 do
  lengths[lane] = redis.call('LLEN', T(lane))
  total = total + lengths[lane]
end
local counters = redis.call('HMGET', COUNTERS, 'open', 'behind')
-- Open tasks that wait behind their limit keys are in no lane.
local open = math.max(tonumber(counters[1] or 0) - tonumber(counters[2] or 0), 0)
local rotate = total > 2 * open + 64
local moved, dropped = 0, 0
for lane = 1, 6 do
  if lengths[lane] > 0 then
    local elements = redis.call('LRANGE', T(lane), -math.min(most, lengths[lane]), -1)
    local ids = {}
    for k = 1, #elements do ids[k] = id_of(elements[k]) end
    local records = hmget(RECORDS, ids)
    local gone, again, seen = 0, {}, {}
    for k = #elements, 1, -1 do
      local record = records[k] or fresh(ids[k])
      local t = record and load(record)
      if t and left(t) > 0 and is_offer(t, elements[k]) then
        if not rotate then break end
        if not seen[ids[k]] then again[#again + 1] = elements[k] end
        seen[ids[k]] = true
      end
      gone = gone + 1
    end
    if gone > 0 then
      redis.call('LTRIM', T(lane), 0, -gone - 1)
      call_all('LPUSH', T(lane), again)
      redis.call('INCRBY', C(lane), gone)
      moved = moved + gone
    end
  end
  local size = redis.call('HLEN', P(lane))
  -- While a task that is reserved for a worker stays at the tail, each new worker name that claims
  -- leaves a pointer ahead of it.
  if size > POINTERS then
    local some = redis.call('HRANDFIELD', P(lane), math.min(size - POINTERS, AT_ONCE))
    dropped = dropped + redis.call('HDEL', P(lane), unpack(some))
  end
  if size > 0 then
    local base = tonumber(redis.call('GET', C(lane)) or 0)
    local pointers = redis.call('HRANDFIELD', P(lane), 50, 'WITHVALUES')
    for k = 1, #pointers, 2 do
      if tonumber(pointers[k + 1]) <= base then dropped = dropped + redis.call('HDEL', P(lane), pointers[k]) end
    end
  end
end
return {moved, dropped}
