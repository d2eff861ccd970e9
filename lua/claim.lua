-- Leases tasks to workers. Each request takes what its worker may have, from the worker's pointer towards the head of
-- the lanes. It passes (moves the pointer beyond) spent elements, and tasks that the worker has completed or holds. It
-- stops at a bound of the request or the call. Spent elements at the tail leave the lane and raise C. It does not pass a
-- task from which the worker rests, because nothing offers the task to it once more; it takes what comes behind.
--
-- ARGV[2] elements to look at in this call, at most 2,000
-- ARGV[3] outbox entries, ARGV[4] outbox bytes at which claims pause
-- ARGV[5] bytes of the whole answer, about   ARGV[6] leases of the shard at which claims pause, '' none
-- ARGV[7] how many delivered grants follow: they are no longer undelivered; then the grants
--         (not where all lanes are empty: a call that finds nothing writes nothing, and nobody waits for the disk)
-- then per request 2 values: worker, and five numbers in one text: tasks at most, bytes at most, whether one task goes
--   out whatever it weighs (0|1), lease (ms, 0 = the task's own), priority (1 to 3, 0 = all); and perhaps a sixth, the
--   secret of the call: its first grant is then the number after it
-- In the row for shards with limited tasks one value more comes last: the limits of the queue (lib/limits.lua).
-- There it takes a limited task only if its limit key may start it. Otherwise the element leaves, and the task waits
-- behind its key as the foremost.
-- Returns an error LIMITED in the row for other shards: nothing was changed, ask by the other row
--       | {generation, 1} claims pause
--       | {generation, 2} all lanes are empty; the delivered grants were not noted
--       | {generation, 0} no task for any request, and asking again at once brings none
--       | {generation, 3} the same, and one of the workers rests from a task: asking again in a moment brings some
--       | {generation, 0, now (ms), grant, ids, bodies, tasks per request, requests with more, attempts, left[, next]}
--   grant: of the first request with tasks, if the call has no secret. The next request with tasks has the next grant.
--   ids, bodies: of all requests, in their order. A task without a body, or with one that is shorter than a head, is
--   damaged, and no lease was given. A task is leased for what the request asks, or for the lease in the body's head.
--   requests with more: the scan of these ended at a bound of the call, so ask again. Counted from 1.
--   attempts: {place, attempt, …} of the tasks whose attempt is not the first. Places count from 1.
--   In a limited shard, next: in how many ms time alone lets a limit key of the call go on, or -1
--   left: the priorities of which lanes have elements now, as peek.lua answers them; and 8 if a worker rests from a task
local sub, byte, char, find = string.sub, string.byte, string.char, string.find
-- KEYS[T + 3 * lane], KEYS[C + 3 * lane], KEYS[P + 3 * lane]: the lanes are the last 18 keys.
local T, C, P = #KEYS - 20, #KEYS - 19, #KEYS - 18
local first_request = 8 + tonumber(ARGV[7])
local function forget_undelivered()
  if first_request > 8 then redis.call('ZREM', UNDELIVERED, unpack(ARGV, 8, first_request - 1)) end
end

-- An empty shard is asked most often, so this answer comes first.
local filled = redis.call('EXISTS', KEYS[T + 3], KEYS[T + 6], KEYS[T + 9], KEYS[T + 12], KEYS[T + 15], KEYS[T + 18])
if filled == 0 then return {generation, 2} end
local counters =
  redis.call('HMGET', COUNTERS, 'grants', 'largest_body', 'outbox_bytes', 'longest_lease', 'open', 'open_bytes',
    'limited')
-- include lib/clock.lua
local limits = nil
-- include lib/limits.lua
-- include lib/head.lua
if counters[7] and not limits then return redis.error_reply('LIMITED the shard has tasks with limit keys') end
if redis.call('XLEN', OUTBOX) >= tonumber(ARGV[3]) or tonumber(counters[3] or 0) >= tonumber(ARGV[4])
  or ARGV[6] ~= '' and redis.call('ZCARD', LEASES) >= tonumber(ARGV[6]) then
  forget_undelivered()
  return {generation, 1}
end

-- Most requests of a call ask for the same, so each text is read once.
local workers, asks, read_asks, wanted = {}, {}, {}, 0
for a = first_request, #ARGV - 1, 2 do
  local text = ARGV[a + 1]
  local ask = read_asks[text]
  if not ask then
    local most, bytes, is_first, lease, priority, secret = string.match(text, '^(%d+) (%d+) (%d) (%d+) (%d) ?(%d*)$')
    ask = {most = tonumber(most), bytes = tonumber(bytes), is_first = is_first == '1', lease = tonumber(lease),
      priority = tonumber(priority), secret = secret}
    read_asks[text] = ask
  end
  workers[#workers + 1], asks[#asks + 1] = ARGV[a], ask
  wanted = wanted + ask.most
end
local budget, call_bytes = tonumber(ARGV[2]), tonumber(ARGV[5])
local first_grant, big = tonumber(counters[1] or 0), tonumber(counters[2] or 0)
local grants, weigh_all = first_grant, wanted * big > call_bytes

-- Decisions change copies, which are written at the end: the records by id, and of each lane what was read of it.
-- Places in a lane count from 1, the tail as the call found it.
local lanes, records, taken, attempts, is_left, damaged = {}, {}, {}, {}, {}, {}
-- Limited tasks that may not start now. The elements of limited tasks begin with this byte.
local refused, LIMITED, limits_of_queue = {}, 148, limits and ARGV[#ARGV]
-- Damaged tasks that counted as open: their records say so, or are lost, and then the elements do.
local were_open = {}
local read_bodies = {}

-- Answers nil for a lane without elements.
local function open_lane(i)
  local length = redis.call('LLEN', KEYS[T + 3 * i])
  if length == 0 then
    lanes[i] = false
    return nil
  end
  filled = filled - 1
  local lane = {length = length, gone = 0, ids = {}, elements = {}, read = 0, stored = {}, passed = {}}
  lanes[i] = lane
  -- Where every task is for one worker, no pointer is ever ahead of the tail, and P is not there.
  if #workers == 1 or redis.call('EXISTS', KEYS[P + 3 * i]) == 1 then
    local pointers = redis.call('HMGET', KEYS[P + 3 * i], unpack(workers))
    for r = 1, #workers do
      if pointers[r] then
        lane.base = lane.base or tonumber(redis.call('GET', KEYS[C + 3 * i]) or 0)
        lane.stored[workers[r]] = pointers[r] - lane.base
      end
    end
  end
  return lane
end

-- Reads elements from the place behind `at` on, and their records: as many as the call may still take; more when those
-- before were not enough.
local function read(i, lane, at)
  lane.read = math.min(math.max(wanted - #taken, 4 * lane.read), 256, budget)
  local elements = redis.call('LRANGE', KEYS[T + 3 * i], -at - lane.read, -at - 1)
  local unknown, several = {}, {}
  for k = #elements, 1, -1 do
    local id = sub(elements[k], -16)
    at = at + 1
    lane.elements[at], lane.ids[at] = elements[k], id
    if records[id] == nil then
      unknown[#unknown + 1] = id
      records[id] = false
      if byte(elements[k], 2) ~= 1 then several[id] = true end
    end
  end
  if #unknown > 0 then
    local found = redis.call('HMGET', RECORDS, unpack(unknown))
    local fresh = {}
    for k = 1, #unknown do
      records[unknown[k]] = found[k]
      if not found[k] then fresh[#fresh + 1] = unknown[k] end
    end
    -- Most tasks have no record yet, only a body: that goes out with the task. A task for several workers always has
    -- one: without it nobody knows who has completed the task.
    if #fresh > 0 and #fresh * big <= call_bytes then
      local found_bodies = redis.call('HMGET', BODIES, unpack(fresh))
      for k = 1, #fresh do
        local id = fresh[k]
        if found_bodies[k] and several[id] then
          damaged[#damaged + 1], were_open[id] = id, true
        elseif found_bodies[k] then
          records[id], read_bodies[id] = '1', found_bodies[k]
        end
      end
    else
      for k = 1, #fresh do
        local id = fresh[k]
        if redis.call('HEXISTS', BODIES, id) == 1 then
          if several[id] then damaged[#damaged + 1], were_open[id] = id, true else records[id] = '1' end
        end
      end
    end
  end
  if limits then
    if limits_of_queue then
      limits().set_queue(limits_of_queue)
      limits_of_queue = nil
    end
    local keys = {}
    for k = 1, #elements do
      if byte(elements[k]) == LIMITED then
        local id, limit = sub(elements[k], -16), sub(elements[k], -25, -18)
        keys[#keys + 1] = limit
        if records[id] == '1' then records[id] = 'k' .. limit .. '1' end
      end
    end
    if keys[1] then limits().read_all(keys) end
  end
end

-- Decides about a record that is not in one of the forms that are text. The functions for records are made only where
-- one is met: each costs every call that makes it.
local function make_judge()
  -- include lib/record.lua
  -- Returns the record to be when the worker takes the task, whether the element is spent then, the attempt, whether
  -- the worker rests from the task; of a limited task the key, and the offer with which the rest of it waits again.
  return function(id, element, worker, grant, priority)
    local t = load(records[id])
    if not t then
      -- Damage from outside. The task counts as missing from now on, and the reconciler brings it back.
      damaged[#damaged + 1] = id
      return nil, true
    end
    local rest = left(t)
    if rest <= 0 and limits and byte(element) == LIMITED then limits().pass(sub(element, -25, -18), id) end
    if rest <= 0 or not is_offer(t, element) then return nil, true end
    local why = bar(t, worker, now)
    if why then
      if t.limit and why ~= 'rests' then limits().pass(t.limit, id) end
      return nil, false, nil, why == 'rests'
    end
    local again = nil
    if t.limit then
      if not limits().may_start(t.limit) then
        t[OFFER] = (t[OFFER] or 0) + 1
        limits().enter(t.limit, id, t[OFFER], priority, true)
        records[id] = save(t)
        refused[#refused + 1] = id
        return nil, true
      end
      if rest > 1 then
        again = (t[OFFER] or 0) + 1
        t[OFFER] = again
      end
    end
    table.insert(t[HELD], worker)
    table.insert(t[HELD], grant)
    return save(t), rest == 1 or t.limit, t[FAILS] + 1, false, t.limit, again
  end
end
local judge

local granted, counts, with_more, any_rests = {}, {}, {}, false
for r = 1, #workers do
  local worker, ask = workers[r], asks[r]
  local most, is_full, has_more = ask.most, false, false
  local weigh, weight = weigh_all or most * big > ask.bytes, 0
  -- One that passes many tasks leaves their part of the budget to those behind it.
  local part = math.max(most, math.floor(budget / (#workers - r + 1)))
  local before, grant, held, name, rests_any = #taken, nil, nil, nil, false

  -- Priorities are strict, except that one claim in ten begins with a lower one, in turn, so that none starves. The
  -- turn moves on each twenty claims: workers that come in turn all get it. A caller with several shards chooses the
  -- priority itself.
  local first, last, order, turn = 1, 6, nil, (grants + math.floor(grants / 20)) % 20
  if ask.priority > 0 then
    first, last = ask.priority * 2 - 1, ask.priority * 2
  elseif turn == 9 then
    order = {3, 4, 5, 6, 1, 2}
  elseif turn == 19 then
    order = {5, 6, 3, 4, 1, 2}
  end

  for n = first, last do
    if #taken - before >= most or is_full then break end
    local i = order and order[n] or n
    local lane = lanes[i]
    -- Once all lanes with elements are known, no other lane is asked.
    if lane == nil and filled > 0 then lane = open_lane(i) end
    if lane and lane.length > lane.gone then
      if not grant then
        -- Below 2^53, so that a number of Lua holds it.
        grant = string.format('%.0f', (tonumber(ask.secret) or first_grant) + grants + 1 - first_grant)
        held = 'h' .. grant .. ':' .. worker
      end
      local at = math.max(lane.passed[worker] or lane.stored[worker] or 0, lane.gone)
      -- C was lost where a pointer lies beyond the head. A pointer is only a cursor.
      if at > lane.length then at = lane.gone end
      -- The first element from which the worker rests: its pointer stays there.
      local at_tail, stays = at == lane.gone, nil
      while #taken - before < most and at < lane.length do
        -- A worker that rests would look at the same elements again.
        if budget <= 0 or part <= 0 then
          has_more = not rests_any
          break
        end
        local id = lane.ids[at + 1]
        if not id then
          read(i, lane, at)
          id = lane.ids[at + 1]
        end
        local record = records[id]
        -- The record to be when the worker takes the task, whether the element is spent afterwards, the attempt.
        local after, is_spent, attempt, rests, limit, again = nil, true, 1, false, nil, nil
        if record == '1' then
          after = held
        elseif record and limits and sub(record, 10) == '1' and byte(record) == 107
          and limits().may_start(sub(record, 2, 9)) then
          limit = sub(record, 2, 9)
          after = 'k' .. limit .. held
        elseif record then
          -- By lib/record.lua: 'h', 'f', 'e' have nothing left, 'm' and a number may have.
          local form = byte(record) or 0
          local num, holders, credited, entries = nil, 0, 0, '\n'
          if form == 109 then
            num, holders, credited = byte(record, 2, 4)
            entries = sub(record, 5)
          elseif form >= 49 and form <= 57 then
            num = tonumber(record)
          end
          if credited and num and num <= 255 then
            -- For several workers, and never rejected.
            local rest = num - holders - credited
            if rest > 0 then
              name = name or '\n' .. worker .. '\t'
              is_spent = false
              if not find(entries, name, 1, true) then
                after = char(109, num, holders + 1, credited) .. entries .. worker .. '\th' .. grant .. '\n'
                is_spent = rest == 1
              end
            end
          elseif form ~= 104 and form ~= 102 and form ~= 101 then
            judge = judge or make_judge()
            after, is_spent, attempt, rests, limit, again =
              judge(id, lane.elements[at + 1], worker, grant, math.ceil(i / 2))
          end
        elseif limits and byte(lane.elements[at + 1]) == LIMITED then
          -- The task is gone, and its key may count it as offered.
          limits().pass(sub(lane.elements[at + 1], -25, -18), id)
        end
        if after and weigh then
          local size = redis.call('HSTRLEN', BODIES, id)
          -- The first task of an answer, and of the call, is handed out whatever it weighs.
          if (#taken > before or not ask.is_first) and weight + size > ask.bytes then is_full = true break end
          if #taken > 0 and size > call_bytes then
            is_full, has_more = true, true
            break
          end
          weight, call_bytes = weight + size, call_bytes - size
        end
        if rests then stays, rests_any = stays or at, true end
        budget, at = budget - 1, at + 1
        if after then
          local place = #taken + 1
          records[id], taken[place] = after, id
          if not is_spent then is_left[place] = true end
          if limit then
            limits().start(limit, id)
            if again then
              limits().enter(limit, id, again, math.ceil(i / 2), true)
              is_left[place] = true
            end
          end
          if attempt > 1 then attempts[#attempts + 1], attempts[#attempts + 2] = place, attempt end
        end
        if at_tail and is_spent then lane.gone = at else at_tail, part = false, part - 1 end
      end
      lane.passed[worker] = stays or at
    end
  end
  counts[r], granted[r] = #taken - before, grant
  if #taken > before then grants = grants + 1 end
  if has_more then with_more[#with_more + 1] = r end
  any_rests = any_rests or rests_any
end

-- Bodies, leases, records.
local fields, bodies = {}, {}
if #taken > 0 then
  local unread, places = {}, {}
  for k = 1, #taken do
    bodies[k] = read_bodies[taken[k]] or false
    if not bodies[k] then
      unread[#unread + 1] = taken[k]
      places[#unread] = k
    end
  end
  if #unread > 0 then
    local found = redis.call('HMGET', BODIES, unpack(unread))
    for k = 1, #unread do bodies[places[k]] = found[k] end
  end
  local record_args, lease_args, undelivered, closed, closed_bytes = {}, {}, {}, 0, 0
  -- Most leases are of one length: a length in a body's head, and a deadline as text, are read and written once.
  local lengths, deadlines, longest, place = {}, {}, 0, 0
  for r = 1, #workers do
    local grant, latest, latest_key = granted[r], nil, nil
    for k = place + 1, place + counts[r] do
      local id, body = taken[k], bodies[k]
      if body and #body >= HEAD then
        local lease, key = asks[r].lease, nil
        if lease == 0 then
          local packed = sub(body, 6, 9)
          lease = lengths[packed]
          if not lease then
            lease = struct.unpack('>I4', packed)
            lengths[packed] = lease
          end
          key = lease
        else
          key = -lease
        end
        local deadline = deadlines[key]
        if not deadline then
          -- A lease of another length than the task's has an uneven deadline (lib/lease.lua).
          deadline = key >= 0 and string.format('%.0f', now + lease) or string.format('%.1f', now + lease - 0.5)
          deadlines[key] = deadline
        end
        local n = #lease_args
        lease_args[n + 1], lease_args[n + 2] = deadline, id .. grant
        record_args[n + 1], record_args[n + 2] = id, records[id]
        if not latest or lease > latest then latest, latest_key = lease, key end
        if not is_left[k] then closed, closed_bytes = closed + 1, closed_bytes + #body + OVERHEAD end
      else
        -- A live record without a body is damage too. An error here would stop the whole lane.
        damaged[#damaged + 1], were_open[id] = id, true
      end
    end
    place = place + counts[r]
    if latest then
      -- A grant is undelivered until its process reports that the worker has it. If its leases run out before, they
      -- cost nothing.
      local n = #undelivered
      undelivered[n + 1], undelivered[n + 2] = deadlines[latest_key], grant
      longest = math.max(longest, latest)
    end
  end
  if #record_args > 0 then
    redis.call('HSET', RECORDS, unpack(record_args))
    redis.call('ZADD', LEASES, unpack(lease_args))
    redis.call('ZADD', UNDELIVERED, unpack(undelivered))
  end
  fields = {'grants', grants}
  if closed > 0 then
    fields = {'grants', grants, 'open', (counters[5] or 0) - closed, 'open_bytes', (counters[6] or 0) - closed_bytes}
  end
  if longest > tonumber(counters[4] or 0) then
    fields[#fields + 1], fields[#fields + 2] = 'longest_lease', longest
  end
end
-- Tasks that a limit key did not let start have a newer offer.
if refused[1] then
  local record_args = {}
  for k = 1, #refused do record_args[2 * k - 1], record_args[2 * k] = refused[k], records[refused[k]] end
  redis.call('HSET', RECORDS, unpack(record_args))
end
local lost, lost_open, lost_bytes = 0, 0, 0
for k = 1, #damaged do
  local id = damaged[k]
  local size = redis.call('HSTRLEN', BODIES, id)
  if limits then
    local _, limit = limited_head(redis.call('HGET', BODIES, size > LARGE and id .. 'h' or id) or '')
    if not limit and records[id] and byte(records[id]) == 107 then limit = sub(records[id], 2, 9) end
    if limit and #limit == 8 then limits().forget(limit, id) end
  end
  local had_record = redis.call('HDEL', RECORDS, id) == 1
  -- Only a task that is not final has a body.
  local was_live = redis.call('HDEL', BODIES, id, id .. 'h') > 0 or had_record and were_open[id]
  if was_live then lost = lost + 1 end
  if was_live and were_open[id] then lost_open, lost_bytes = lost_open + 1, lost_bytes + size + OVERHEAD end
end
-- Behind the other writes: only for its first write does Redis ask whether there is room.
forget_undelivered()

-- Lanes: removes what left the tail, and keeps the pointers that are still ahead of it.
local priorities, last_priority = 0, nil
for i = 1, 6 do
  local lane, priority = lanes[i], math.ceil(i / 2)
  local has_elements = lane and lane.length > lane.gone
  -- A lane with elements that no request asked for.
  if lane == nil and filled > 0 then has_elements = redis.call('EXISTS', KEYS[T + 3 * i]) == 1 end
  if has_elements and priority ~= last_priority then
    priorities, last_priority = priorities + 2 ^ (priority - 1), priority
  end
  if lane then
    if lane.gone > 0 then
      redis.call('LTRIM', KEYS[T + 3 * i], 0, -lane.gone - 1)
      lane.base = redis.call('INCRBY', KEYS[C + 3 * i], lane.gone) - lane.gone
    end
    local pointers, overtaken, front = {}, {}, 0
    for worker, at in pairs(lane.passed) do
      if at > lane.gone then
        lane.base = lane.base or tonumber(redis.call('GET', KEYS[C + 3 * i]) or 0)
        pointers[#pointers + 1], pointers[#pointers + 2] = worker, lane.base + at
        front = math.max(front, lane.base + at)
      elseif lane.stored[worker] then
        overtaken[#overtaken + 1] = worker
      end
    end
    if #pointers > 0 then
      redis.call('HSET', KEYS[P + 3 * i], unpack(pointers))
      if front > tonumber(redis.call('HGET', COUNTERS, 'front' .. i) or 0) then
        fields[#fields + 1], fields[#fields + 2] = 'front' .. i, front
      end
    end
    if #overtaken > 0 then redis.call('HDEL', KEYS[P + 3 * i], unpack(overtaken)) end
  end
end
local next_start = nil
if limits then
  local next_ms, filled_lanes = settle_limits()
  if filled_lanes then
    next_start = next_ms or -1
    for i in pairs(filled_lanes) do
      local bit = 2 ^ (math.ceil(i / 2) - 1)
      if math.floor(priorities / bit) % 2 == 0 then priorities = priorities + bit end
    end
  end
end
if #fields > 0 then redis.call('HSET', COUNTERS, unpack(fields)) end
if lost > 0 then redis.call('HINCRBY', COUNTERS, 'live', -lost) end
if lost_open > 0 then
  redis.call('HINCRBY', COUNTERS, 'open', -lost_open)
  redis.call('HINCRBY', COUNTERS, 'open_bytes', -lost_bytes)
end
if #taken == 0 and #with_more == 0 and not next_start then return {generation, any_rests and 3 or 0} end
if any_rests then priorities = priorities + 8 end
return {generation, 0, now, first_grant + 1, table.concat(taken), bodies, counts, with_more, attempts, priorities,
  next_start}
