-- Leases tasks to workers. Each request takes what its worker may have, from the worker's pointer towards the head of
-- the lanes. It passes (moves the pointer beyond) spent elements, and tasks that the worker has completed or holds. It
-- stops at a bound of the request or the call. Spent elements at the tail leave the lane and raise C.
--
-- ARGV[2] elements to look at in this call, at most
-- ARGV[3] outbox entries, ARGV[4] outbox bytes at which claims pause
-- ARGV[5] bytes of the whole answer, about   ARGV[6] leases of the shard at which claims pause, '' none
-- ARGV[7] how many delivered grants follow: they are no longer undelivered; then the grants
-- then per request 6 values: worker, tasks at most, bytes at most, whether one task goes out whatever it weighs (0|1),
--   lease (ms, 0 = the task's own), priority (1 to 3, 0 = all)
-- Returns {generation, paused 0|1, request, …}; request = {grant, more 0|1, {id, body, attempt, deadline (ms)}, …}.
--   more: the scan ended at a bound of the call, so ask again
local budget, call_bytes = tonumber(ARGV[2]), tonumber(ARGV[5])
local first_request = 8 + tonumber(ARGV[7])
local delivered = {}
for a = 8, first_request - 1 do delivered[#delivered + 1] = ARGV[a] end
local counters = redis.call('HMGET', COUNTERS, 'grants', 'largest_body', 'outbox_bytes', 'longest_lease')
if redis.call('XLEN', OUTBOX) >= tonumber(ARGV[3]) or tonumber(counters[3] or 0) >= tonumber(ARGV[4])
  or ARGV[6] ~= '' and redis.call('ZCARD', LEASES) >= tonumber(ARGV[6]) then
  call_all('ZREM', UNDELIVERED, delivered)
  return {generation, 1}
end

local wanted = 0
for a = first_request, #ARGV, 6 do wanted = wanted + tonumber(ARGV[a + 1]) end
local grants, big, longest = tonumber(counters[1] or 0), tonumber(counters[2] or 0), tonumber(counters[4] or 0)
local first_grant = grants
local weigh_all = wanted * big > call_bytes

-- Priorities are strict, except that one claim in ten begins with a lower one, in turn, so that none starves. A caller
-- with several shards chooses the priority itself.
local STRICT, MEDIUM_FIRST, LOW_FIRST = {1, 2, 3, 4, 5, 6}, {3, 4, 5, 6, 1, 2}, {5, 6, 3, 4, 1, 2}
local function order_of(turn, priority)
  if priority > 0 then return {priority * 2 - 1, priority * 2} end
  if turn % 20 == 9 then return MEDIUM_FIRST end
  if turn % 20 == 19 then return LOW_FIRST end
  return STRICT
end

-- Decisions change copies, which are written at the end: the records by id, and of each lane the window of elements
-- nearest to the tail.
local lanes, records, changed = {}, {}, {}
for i = 1, 6 do
  lanes[i] = {length = redis.call('LLEN', T(i)), gone = 0, window = {}, pointers = {}, known = {}, front = 0}
end

local function open_lane(i)
  local lane = lanes[i]
  if not lane.base then
    lane.base = tonumber(redis.call('GET', C(i)) or 0)
    lane.front = tonumber(redis.call('HGET', COUNTERS, 'front' .. i) or 0)
    lane.first_front = lane.front
  end
  return lane
end

local function remember(ids)
  local unknown = {}
  for _, id in ipairs(ids) do
    if records[id] == nil then
      unknown[#unknown + 1] = id
      records[id] = false
    end
  end
  if #unknown > 0 then
    for i, record in ipairs(hmget(RECORDS, unknown)) do records[unknown[i]] = record end
  end
end

-- The elements from..to, counted from the tail (0 = the tail as the call found it), oldest first.
local function read(i, from, to)
  local found = redis.call('LRANGE', T(i), -to - 1, -from - 1)
  local elements, ids, n = {}, {}, #found
  for k = 1, n do
    elements[k] = found[n + 1 - k]
    ids[k] = id_of(elements[k])
  end
  remember(ids)
  return elements
end

local function elements_at(i, lane, at, need)
  local to = math.min(at + math.max(need, 8), lane.length) - 1
  if at > #lane.window then return read(i, at, to) end
  if at == #lane.window then
    to = math.min(at + math.max(math.min(wanted, 256), 8), lane.length) - 1
    for _, element in ipairs(read(i, at, to)) do table.insert(lane.window, element) end
  end
  local elements = {}
  for k = at + 1, math.min(at + math.max(need, 8), #lane.window) do elements[#elements + 1] = lane.window[k] end
  return elements
end

-- Returns 'spent', 'pass', or 'take' with the new record, the attempt, and whether the element is spent by it.
local damaged = {}
local function judge(element, id, worker, grant)
  local record = records[id]
  if not record then return 'spent' end
  local form = string.byte(record)
  if form == 104 or form == 102 then return 'spent' end
  if record == '1' then return 'take', 'h' .. grant .. ':' .. worker, 1, true end
  local t = load(record)
  if not t then
    -- Damage from outside. Without its record the task counts as missing, and the reconciler brings it back.
    damaged[#damaged + 1] = id
    return 'spent'
  end
  local rest = left(t)
  if rest <= 0 or not is_offer(t, element) then return 'spent' end
  if find_worker(t[CREDITED], worker) or find_worker(t[HELD], worker) then return 'pass' end
  local failed = t[FAILED] and find_worker(t[FAILED], worker)
  if failed and t[FAILED][failed + 1] == REFUSED then return 'pass' end
  table.insert(t[HELD], worker)
  table.insert(t[HELD], grant)
  return 'take', save(t), t[FAILS] + 1, rest == 1
end

local taken, answers = {}, {}
for a = first_request, #ARGV, 6 do
  local worker, most, most_bytes, lease = ARGV[a], tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 4])
  local is_first = ARGV[a + 3] == '1'
  local grant = tostring(grants + 1)
  local weigh = weigh_all or most * big > most_bytes
  local got, weight, more, full = 0, 0, 0, false
  local answer = {grant, 0}
  for _, i in ipairs(order_of(grants, tonumber(ARGV[a + 5]))) do
    local lane = lanes[i]
    if got < most and not full and lane.length > lane.gone then
      open_lane(i)
      local pointer = lane.pointers[worker]
      if not pointer then
        pointer = tonumber(redis.call('HGET', P(i), worker) or 0)
        lane.known[worker] = pointer > 0
      end
      local at = math.max(pointer - lane.base, lane.gone)
      -- C was lost where a pointer lies beyond the head. A pointer is only a cursor.
      if at > lane.length then at = lane.gone end
      local at_tail = at == lane.gone
      while got < most and not full and at < lane.length do
        if budget <= 0 then more = 1 break end
        for _, element in ipairs(elements_at(i, lane, at, most - got)) do
          if got >= most or budget <= 0 then break end
          local id = id_of(element)
          local verdict, record, attempt, last = judge(element, id, worker, grant)
          if verdict == 'take' and weigh then
            local size = redis.call('HSTRLEN', BODIES, id)
            -- The first task of an answer, and of the call, is handed out whatever it weighs.
            if (got > 0 or not is_first) and weight + size > most_bytes then full = true break end
            if #taken > 0 and size > call_bytes then
              full, more = true, 1
              break
            end
            weight, call_bytes = weight + size, call_bytes - size
          end
          budget = budget - 1
          at = at + 1
          if verdict == 'take' then
            got = got + 1
            records[id], changed[id] = record, true
            taken[#taken + 1] =
              {id = id, grant = grant, attempt = attempt, lease = lease, last = last, answer = answer}
          end
          if at_tail and (verdict == 'spent' or last) then lane.gone = at else at_tail = false end
        end
      end
      pointer = lane.base + at
      lane.front = math.max(lane.front, pointer)
      lane.pointers[worker] = pointer
    end
  end
  if got > 0 then grants = grants + 1 end
  answer[2] = more
  answers[#answers + 1] = answer
end

-- Bodies, leases, records.
local ids = {}
for k, t in ipairs(taken) do ids[k] = t.id end
local bodies = hmget(BODIES, ids)
local lease_args, closed, closed_bytes, last_deadline = {}, 0, 0, {}
for k, t in ipairs(taken) do
  local body = bodies[k]
  if body and #body >= 9 then
    local lease = t.lease
    if lease == 0 then
      local _, _, own = struct.unpack('>BI4I4', body)
      lease = own
    end
    lease_args[#lease_args + 1] = now + lease
    lease_args[#lease_args + 1] = t.id .. t.grant
    last_deadline[t.grant] = math.max(last_deadline[t.grant] or 0, now + lease)
    if t.last then
      closed = closed + 1
      closed_bytes = closed_bytes + #body + OVERHEAD
    end
    table.insert(t.answer, {t.id, body, t.attempt, now + lease})
  else
    -- A live record without a body is damage too. An error here would stop the whole lane.
    changed[t.id] = nil
    damaged[#damaged + 1] = t.id
  end
end
call_all('HDEL', RECORDS, damaged)
local record_args = {}
for id in pairs(changed) do
  record_args[#record_args + 1] = id
  record_args[#record_args + 1] = records[id]
end
call_all('HSET', RECORDS, record_args)
call_all('ZADD', LEASES, lease_args)
-- A grant is undelivered until its process reports that the worker has it. If its leases run out before, they cost
-- nothing.
local undelivered = {}
for grant, deadline in pairs(last_deadline) do
  undelivered[#undelivered + 1], undelivered[#undelivered + 2] = deadline, grant
  if deadline - now > longest then longest = deadline - now end
end
call_all('ZADD', UNDELIVERED, undelivered)
-- Behind the other writes: only for its first write does Redis ask whether there is room.
call_all('ZREM', UNDELIVERED, delivered)
if longest > tonumber(counters[4] or 0) then redis.call('HSET', COUNTERS, 'longest_lease', longest) end
count('grants', grants - first_grant)
count('open', -closed)
count('open_bytes', -closed_bytes)

-- Lanes: removes what left the tail, and keeps the pointers that are still ahead of it.
for i = 1, 6 do
  local lane = lanes[i]
  if lane.gone > 0 then
    redis.call('LTRIM', T(i), 0, -lane.gone - 1)
    redis.call('INCRBY', C(i), lane.gone)
  end
  if lane.base then
    for worker, pointer in pairs(lane.pointers) do
      if pointer > lane.base + lane.gone then
        redis.call('HSET', P(i), worker, pointer)
      elseif lane.known[worker] then
        redis.call('HDEL', P(i), worker)
      end
    end
    if lane.front > lane.first_front and lane.front > lane.base + lane.gone then
      redis.call('HSET', COUNTERS, 'front' .. i, lane.front)
    end
  end
end
return {generation, 0, unpack(answers)}
