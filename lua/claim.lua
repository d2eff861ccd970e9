-- Leases tasks to workers: for each request, from the worker's pointer towards the head of the lanes, what it may take.
-- Passes (moves the pointer beyond) what is spent and what the worker has completed or holds; stops at what is only for now not allowed.
-- Spent elements at the tail leave the lane and raise C.
--
-- ARGV[2] elements to look at in this call, at most   ARGV[3] outbox entries at which claims pause
-- then per request 4 values: worker, tasks at most, bytes at most, lease (ms, 0 = the task's own)
-- Returns {generation, paused 0|1, request, …}; request = {grant, more 0|1, {id, body, attempt, deadline (ms)}, …}: `more` when the scan
-- ended at its bound: ask again.
local budget = tonumber(ARGV[2])
if redis.call('XLEN', OUT) >= tonumber(ARGV[3]) then return {generation, 1} end

local wanted = 0
for a = 4, #ARGV, 4 do wanted = wanted + tonumber(ARGV[a + 1]) end
local meta = redis.call('HMGET', META, 'n', 'big')
local grants, big = tonumber(meta[1] or 0), tonumber(meta[2] or 0)
local first_grant = grants

-- Strict priorities, but one claim in ten is offered to the lower ones first, in turn, so that none starves.
local STRICT, MEDIUM_FIRST, LOW_FIRST = {1, 2, 3, 4, 5, 6}, {3, 4, 5, 6, 1, 2}, {5, 6, 3, 4, 1, 2}
local function order_of(turn)
  if turn % 20 == 9 then return MEDIUM_FIRST end
  if turn % 20 == 19 then return LOW_FIRST end
  return STRICT
end

-- Everything is decided on copies and written at the end: records by id, and per lane the window of elements nearest to the tail.
local lanes, records, changed = {}, {}, {}
for i = 1, 6 do
  lanes[i] = {length = redis.call('LLEN', T(i)), gone = 0, window = {}, pointers = {}, known = {}, front = 0}
end

local function open_lane(i)
  local lane = lanes[i]
  if not lane.base then
    lane.base = tonumber(redis.call('GET', C(i)) or 0)
    lane.front = tonumber(redis.call('HGET', META, 'f' .. i) or 0)
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
    for i, record in ipairs(hmget(REC, unknown)) do records[unknown[i]] = record end
  end
end

-- Ids of elements from..to, counted from the tail (0 = the tail as the call found it), oldest first.
local function read(i, from, to)
  local elements = redis.call('LRANGE', T(i), -to - 1, -from - 1)
  local ids, n = {}, #elements
  for k = 1, n do ids[k] = string.sub(elements[n + 1 - k], -16) end
  remember(ids)
  return ids
end

local function ids_at(i, lane, at, need)
  local to = math.min(at + math.max(need, 8), lane.length) - 1
  if at > #lane.window then return read(i, at, to) end
  if at == #lane.window then
    to = math.min(at + math.max(math.min(wanted, 256), 8), lane.length) - 1
    for _, id in ipairs(read(i, at, to)) do table.insert(lane.window, id) end
  end
  local ids = {}
  for k = at + 1, math.min(at + math.max(need, 8), #lane.window) do ids[#ids + 1] = lane.window[k] end
  return ids
end

-- 'spent', 'pass' or 'take' (then with the record to be), for this worker.
local function judge(id, worker, grant)
  local record = records[id]
  if not record then return 'spent' end
  local form = string.byte(record)
  if form == 104 or form == 102 then return 'spent' end
  if record == '1' then return 'take', 'h' .. grant .. ':' .. worker, 1, true end
  local t = load(record)
  local rest = left(t)
  if rest <= 0 then return 'spent' end
  if find_worker(t[CREDITED], worker) or find_worker(t[HELD], worker) then return 'pass' end
  table.insert(t[HELD], worker)
  table.insert(t[HELD], grant)
  return 'take', save(t), t[FAILS] + 1, rest == 1
end

local taken, answers = {}, {}
for a = 4, #ARGV, 4 do
  local worker, most, most_bytes, lease = ARGV[a], tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local grant = tostring(grants + 1)
  local weigh = most * big > most_bytes
  local got, weight, more, full = 0, 0, 0, false
  local answer = {grant, 0}
  for _, i in ipairs(order_of(grants)) do
    local lane = lanes[i]
    if got < most and not full and lane.length > lane.gone then
      open_lane(i)
      local pointer = lane.pointers[worker]
      if not pointer then
        pointer = tonumber(redis.call('HGET', P(i), worker) or 0)
        lane.known[worker] = pointer > 0
      end
      local started = math.max(pointer - lane.base, lane.gone)
      local at, at_tail = started, started == lane.gone
      while got < most and not full and at < lane.length do
        if budget <= 0 then more = 1 break end
        for _, id in ipairs(ids_at(i, lane, at, most - got)) do
          if got >= most or budget <= 0 then break end
          local verdict, record, attempt, last = judge(id, worker, grant)
          if verdict == 'take' and weigh then
            local size = redis.call('HSTRLEN', BODY, id)
            -- One task is handed out whatever it weighs.
            if got > 0 and weight + size > most_bytes then full = true break end
            weight = weight + size
          end
          budget = budget - 1
          at = at + 1
          if verdict == 'take' then
            got = got + 1
            records[id], changed[id] = record, true
            taken[#taken + 1] = {id = id, grant = grant, attempt = attempt, lease = lease, last = last, answer = answer}
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
local bodies = hmget(BODY, ids)
local lease_args, closed, closed_bytes = {}, 0, 0
for k, t in ipairs(taken) do
  local body = bodies[k]
  if body then
    local lease = t.lease
    if lease == 0 then
      local _, _, own = struct.unpack('>BI4I4', body)
      lease = own
    end
    lease_args[#lease_args + 1] = now + lease
    lease_args[#lease_args + 1] = t.id .. t.grant
    if t.last then
      closed = closed + 1
      closed_bytes = closed_bytes + #body
    end
    table.insert(t.answer, {t.id, body, t.attempt, now + lease})
  else
    -- A live record without a body is damage from outside. Without its record the task counts as missing, and the reconciler
    -- brings it back from SQL; an error here would stop the whole lane.
    changed[t.id] = nil
    redis.call('HDEL', REC, t.id)
  end
end
local record_args = {}
for id in pairs(changed) do
  record_args[#record_args + 1] = id
  record_args[#record_args + 1] = records[id]
end
call_all('HSET', REC, record_args)
call_all('ZADD', LEASE, lease_args)
count('n', grants - first_grant)
count('open', -closed)
count('bytes', -closed_bytes)

-- Lanes: what left the tail, and the pointers that are still ahead of it. P is only a cursor.
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
      redis.call('HSET', META, 'f' .. i, lane.front)
    end
  end
end
return {generation, 0, unpack(answers)}
