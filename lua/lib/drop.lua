
-- How many elements of lanes this call may pass in all of its searches. The script sets it.
local budget = 0

-- Returns the indexes of an element in a lane (two at most, counted from the head), and whether the
-- budget ended before the lane.
local function search(lane, wanted)
  local length = redis.call('LLEN', T(lane))
  local most = math.min(length, budget)
  if most <= 0 then return {}, length > 0 end
  budget = budget - most
  return redis.call('LPOS', T(lane), wanted, 'COUNT', 2, 'MAXLEN', most), most < length
end

-- Removes a task from the shard because of damage that can only be repaired by publishing it again.
-- The caller does that, unless SQL shows the task as final. The newest of its elements is replaced
-- by a spent one, so that all pointers stay right. An element that lies beyond the budget stays: it
-- is spent while the task has no record, and later counts as one too many, which fsck finds.
local SPENT_ID = string.rep('\0', 16)
local function spend(lane, at) redis.call('LSET', T(lane), at, element(1, 0, SPENT_ID)) end
local function drop(id, t)
  local num, offer, limit = t and t[NUM] or 1, t and t[OFFER] or 0, t and t.limit
  if limit then
    limits().forget(limit, id)
  elseif not t then
    forget_limit(id, redis.call('HGET', RECORDS, id))
  end
  for lane = 1, 6 do
    local at = search(lane, element(num, offer, id, limit))[1]
    if at then spend(lane, at) end
  end
  if t and t[ST] == 'L' then
    if left(t) > 0 then
      count('open', -1)
      count('open_bytes', -weight_of(id))
    end
    for i = 2, #t[HELD], 2 do redis.call('ZREM', LEASES, id .. t[HELD][i]) end
    for _, grant in ipairs(t[WAIT]) do redis.call('ZREM', DELAYED, id .. grant) end
    count('live', -1)
  end
  redis.call('HDEL', RECORDS, id)
  redis.call('HDEL', BODIES, id, id .. 'h')
end
