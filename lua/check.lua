-- Compares a slice of the shard with the rest of it, in one step: whatever it reports was true at
-- that moment. Repairs what it finds in the same step, if asked.
--
-- ARGV[2] part: 'records', 'leases', 'delayed', 'bodies', 'limits', or the number of a lane, for its pointers
-- ARGV[3] cursor, '0' begins   ARGV[4] entries at most, about   ARGV[5] 1 repairs, 0 only reports
-- ARGV[6] elements of lanes to pass at most: a task that is dropped costs a walk over its lanes
-- Returns {next cursor ('0': the end), findings, tasks, 1 ask for the slice again | 0}
--   findings: {kind, id of the task or '', what is wrong, …}
--   tasks, for 'records', and for 'bodies' those without a record: {id, state, newest offer, number
--   of past ends, …}; state: 'o' live with a replica to claim, 'l' other live ones, 'f' final
-- A task that is dropped here is missing from now on: the caller publishes it again. A call drops
-- at most 16 tasks. It neither reports nor repairs further such tasks of its slice, and the caller
-- asks for the slice again.
local MOST_DROPPED = 16
local part, mends = ARGV[2], ARGV[5] == '1'
local lane = tonumber(part)
local finds, tasks, dropped, again = {}, {}, 0, 0
budget = tonumber(ARGV[6])
local function find(kind, id, text)
  local n = #finds
  finds[n + 1], finds[n + 2], finds[n + 3] = kind, id, text
end

-- Reports a task that can only be repaired by publishing it again, and drops it.
local function find_and_drop(kind, id, text, t)
  if mends and (dropped == MOST_DROPPED or dropped > 0 and budget <= 0) then
    again = 1
    return
  end
  find(kind, id, text)
  if mends then
    drop(id, t)
    dropped = dropped + 1
  end
end

local function check_leases(id, t)
  for i = 2, #t[HELD], 2 do
    local grant = t[HELD][i]
    if not redis.call('ZSCORE', LEASES, id .. grant) then
      find('held_without_lease', id, t[HELD][i - 1] .. ' holds it by grant ' .. grant)
      -- The worker may still be busy with it, so begin the lease again. It is unknown when it was
      -- claimed.
      if mends then redis.call('ZADD', LEASES, now + lease_of(id) - 0.5, id .. grant) end
    end
  end
end

-- Returns whether the task is dropped, now or by the next call.
local function check_delays(id, t)
  for _, grant in ipairs(t[WAIT]) do
    if not redis.call('ZSCORE', DELAYED, id .. grant) then
      if grant == '' then
        find_and_drop('waits_without_delay', id, 'it waits for its time, and nothing says when that is', t)
        return mends
      end
      find('waits_without_delay', id, 'a replica is in backoff since grant ' .. grant .. ', and nothing ends that')
      if mends then redis.call('ZADD', DELAYED, now, id .. grant) end
    end
  end
  return false
end

local function check_record(id, record)
  local t = load(record)
  if not t then
    find_and_drop('unreadable_record', id, #record .. ' bytes that are no record')
    return
  end
  local size, state = redis.call('HSTRLEN', BODIES, id), 'f'
  if t[ST] == 'L' then
    if size < HEAD then
      find_and_drop('lost_payload', id, size .. ' bytes where its payload should be', t)
      return
    end
    check_leases(id, t)
    if check_delays(id, t) then return end
    state = left(t) > 0 and 'o' or 'l'
  elseif size > 0 then
    find('body_without_task', id, 'its payload is kept, and the task is final')
    if mends then redis.call('HDEL', BODIES, id, id .. 'h') end
  end
  local n = #tasks
  tasks[n + 1], tasks[n + 2], tasks[n + 3], tasks[n + 4] = id, state, t[OFFER] or 0, t[PAST] or 0
end

-- Returns the record of a task if it can be read and the task is live.
local function live(id)
  local record = record_of(id)
  local t = record and load(record)
  return t and t[ST] == 'L' and t
end

local function check_lease(member)
  local id, grant = string.sub(member, 1, 16), string.sub(member, 17)
  local t, holds = live(id), false
  for i = 2, t and #t[HELD] or 0, 2 do holds = holds or t[HELD][i] == grant end
  if not holds then
    find('lease_without_holder', #id == 16 and id or '', 'nobody holds the task by grant ' .. grant)
    if mends then redis.call('ZREM', LEASES, member) end
  end
end

local function check_delay(member)
  local id, grant = string.sub(member, 1, 16), string.sub(member, 17)
  local t, waits = live(id), false
  for _, waiting in ipairs(t and t[WAIT] or {}) do waits = waits or waiting == grant end
  if not waits then
    find('delay_without_task', #id == 16 and id or '', 'nothing waits for grant ' .. grant)
    if mends then redis.call('ZREM', DELAYED, member) end
  end
end

local function check_body(field)
  local id = string.sub(field, 1, 16)
  if redis.call('HEXISTS', RECORDS, id) == 1 then return end
  if field == id and #id == 16 then return check_record(id, record_of(id)) end
  if #field < 16 or redis.call('HEXISTS', BODIES, id) == 0 then
    find('body_without_task', #id == 16 and id or '', 'there is no such task')
    if mends then redis.call('HDEL', BODIES, field) end
  end
end

local function check_limit(limit)
  -- Tasks wait, and no lease or element is there to end, and no time. Below 0 at a time: an operator lets nothing start.
  local told = limits().tell(limit)
  local asleep = told[1] == 0 and told[2] == 0 and told[3] > 0 and told[6] >= 0 and not redis.call('ZSCORE', STARTS, limit)
  local leases, offers = limits().counted(limit)
  for id, count in pairs(leases) do
    local t = live(id)
    local held = t and t.limit == limit and #t[HELD] / 2 or 0
    if count > held then
      find('limit_without_lease', id, 'its limit key counts ' .. count .. ' leases of it, and ' .. held .. ' are there')
      for _ = held + 1, mends and count or held do limits().lease_ended(limit, id) end
    end
  end
  for id, count in pairs(offers) do
    local t = live(id)
    -- A replica in backoff may have been offered until the worker for whom the task was reserved completed it.
    if not t or t.limit ~= limit or left(t) <= 0 and #t[WAIT] == 0 then
      find('limit_without_offer', id, 'its limit key counts it as offered, and no replica of it is left to claim')
      for _ = 1, mends and count or 0 do limits().pass(limit, id) end
    end
  end
  if asleep then
    local name = string.gsub(limit, '.', function(c) return string.format('%02x', string.byte(c)) end)
    find('limit_asleep', '', 'tasks wait behind limit key ' .. name .. ', which may start them, and nothing wakes it')
    if mends then limits().touch(limit) end
  end
end

local function check_pointer(worker, passed)
  local gone, length = tonumber(redis.call('GET', C(lane)) or 0), redis.call('LLEN', T(lane))
  local number = tonumber(passed)
  if not number or number > gone + length then
    find('pointer_out_of_range', '', worker .. ' has passed ' .. passed .. ' of ' .. gone + length .. ' elements')
    if mends then redis.call('HDEL', P(lane), worker) end
  end
end

local page
if part == 'records' then
  page = redis.call('HSCAN', RECORDS, ARGV[3], 'COUNT', ARGV[4])
  for i = 1, #page[2], 2 do check_record(page[2][i], page[2][i + 1]) end
elseif part == 'leases' then
  page = redis.call('ZSCAN', LEASES, ARGV[3], 'COUNT', ARGV[4])
  for i = 1, #page[2], 2 do check_lease(page[2][i]) end
elseif part == 'delayed' then
  page = redis.call('ZSCAN', DELAYED, ARGV[3], 'COUNT', ARGV[4])
  for i = 1, #page[2], 2 do check_delay(page[2][i]) end
elseif part == 'limits' then
  page = redis.call('HSCAN', LIMITS, ARGV[3], 'COUNT', ARGV[4])
  for i = 1, #page[2], 2 do
    if #page[2][i] == 8 then check_limit(page[2][i]) end
  end
elseif part == 'bodies' then
  -- The scan reads the payloads, too, so scan fewer entries if they may be large.
  local largest = tonumber(redis.call('HGET', COUNTERS, 'largest_body') or 0)
  local most = math.max(math.min(tonumber(ARGV[4]), math.floor(2 ^ 21 / (largest + 1))), 1)
  page = redis.call('HSCAN', BODIES, ARGV[3], 'COUNT', most)
  for i = 1, #page[2], 2 do check_body(page[2][i]) end
else
  page = redis.call('HSCAN', P(lane), ARGV[3], 'COUNT', ARGV[4])
  for i = 1, #page[2], 2 do check_pointer(page[2][i], page[2][i + 1]) end
end
settle_limits()
return {again == 1 and ARGV[3] or page[1], finds, tasks, again}
