-- Puts tasks from `pipeline` into the shard and stores how far the shard has read, in one step. So each record is
-- enqueued exactly once, however often it is read. A task that the shard has, live or final, is ignored: the bus may
-- carry it twice, at different offsets. A task whose record cannot be read counts as new. A task that was sent again
-- has a higher epoch than before, and replaces its final record of an earlier epoch.
-- The epoch of a partition's owner is higher than that of the owner before. A caller with a lower one has lost the
-- partition.
--
-- Tasks that were never on the bus come with the shard's fence, as the caller knew it before it stored them in SQL. The
-- fence moves when a task comes that may have come before, when one ends that never came, and with the generation. So
-- while the fence stands, none of these tasks was here, and none is done and forgotten.
-- Tasks that waited in SQL for room may be here. They come with the fence as the caller knew it before it read them,
-- and with how often tasks were forgotten by then. So each that SQL showed unfinished is still known, if it ever was.
-- They move the fence.
--
-- ARGV[2] wake channel   ARGV[3] the wake: queue, and perhaps a process   ARGV[4] topic generation
-- ARGV[5] offset of the record of this queue that the caller enqueued last ('' unknown): refuses when the stored offset
--         is behind it. If ARGV[6] is '': the fence ('' unknown), of new tasks without the number of forgets
-- ARGV[6] offset to store when every task was dealt with: that of the last one, or behind it; '' the tasks were never
--         on the bus
-- ARGV[7] high water in tasks   ARGV[8] in bytes
-- ARGV[9] epoch   ARGV[10] live tasks at most, whatever they wait for
-- ARGV[11] offsets of the tasks in the order of the partition, with a space between them   ARGV[12] NUM of most tasks
-- ARGV[13] 1: a task of these may have come before   ARGV[14] how many tasks; at most 3,000
-- then per task 2 values: id, body
-- then 5 values per task that has another NUM, waits for its time, has credited workers, or was sent again:
--   place (from 1), NUM, not_before (ms, 0 at once), credited workers as msgpack array ('' none), epoch of the task
-- In the row for limited tasks one value more comes last: the limits of the queue (lib/limits.lua). There a task whose
-- body names a limit key waits behind it, and no high water of lanes counts it. If enough of its key wait there, it is
-- crowded: it is left to the caller, who puts it into SQL, and no offset is stored.
-- Returns {'fenced', epoch of the present owner}: nothing was changed
--       | {'behind', stored offset or ''}: Redis fell back, nothing was changed, seek there
--       | {'moved', the fence: generation/moves/forgets}: nothing was changed
--       | {'ok', dealt with, added, known[, next, crowded]}: in the row for limited tasks, in how many ms time alone lets a
--         limit key of the call go on, or -1, and the places (from 1) of the crowded tasks, which count as dealt with. When
--         fewer were dealt with than given, the queue is full at the next one
--       | an error BADTASK for a body without a known priority: nothing was changed
local counters =
  redis.call('HMGET', COUNTERS, 'open_bytes', 'largest_body', 'epoch', 'live', 'open', 'fence', 'forgets')
local epoch, known_epoch, is_from_bus = tonumber(ARGV[9]), tonumber(counters[3] or 0), ARGV[6] ~= ''

-- Whether the first offset of the text lies behind the offset; '' lies before all.
local function is_behind(text, offset)
  if offset == '' then return true end
  local major, minor = string.match(text, '^(%d+)%-(%d+)')
  local to_major, to_minor = string.match(offset, '^(%d+)%-(%d+)')
  major, to_major = tonumber(major), tonumber(to_major)
  return major > to_major or major == to_major and tonumber(minor) > tonumber(to_minor)
end

local topic = ARGV[4] .. '/'
local stored = redis.call('GET', OFFSET)
stored = stored and string.sub(stored, 1, #topic) == topic and string.sub(stored, #topic + 1) or ''
if is_from_bus then
  if epoch < known_epoch then return {'fenced', known_epoch} end
  if ARGV[5] ~= '' and ARGV[5] ~= stored and is_behind(ARGV[5], stored) then
    return {'behind', stored}
  end
else
  local fence = generation .. '/' .. (counters[6] or 0)
  local whole = fence .. '/' .. (counters[7] or 0)
  if ARGV[5] ~= fence and ARGV[5] ~= whole then return {'moved', whole} end
end

-- The queue is full by what the foremost worker still has ahead, so that a slow worker does not starve the others.
-- Tasks that wait for their time or their backoff are ahead of no worker. They, and what slow workers have left, count
-- against a bound of their own.
-- KEYS[T + 3 * lane], KEYS[C + 3 * lane]: the lanes are the last 18 keys.
local T, C = #KEYS - 20, #KEYS - 19
local high_tasks, high_bytes, most_live = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[10])
local count, ahead = tonumber(ARGV[14]), 0
if count > 0 then
  local lengths = {}
  for lane = 1, 6 do
    lengths[lane] = redis.call('LLEN', KEYS[T + 3 * lane])
    ahead = ahead + lengths[lane]
  end
  -- No more than all elements are ahead. Only a queue that is nearly full has to know how many.
  if ahead + count > high_tasks then
    ahead = 0
    for lane = 1, 6 do
      if lengths[lane] > 0 then
        local gone = tonumber(redis.call('GET', KEYS[C + 3 * lane]) or 0)
        local front = tonumber(redis.call('HGET', COUNTERS, 'front' .. lane) or 0)
        ahead = ahead + math.min(lengths[lane], lengths[lane] + gone - front)
      end
    end
  end
end
local bytes, big, live = tonumber(counters[1] or 0), tonumber(counters[2] or 0), tonumber(counters[4] or 0)

local ids, offsets, others = {}, nil, {}
for i = 1, count do ids[i] = ARGV[13 + 2 * i] end
local function read_offsets()
  offsets = {}
  for offset in string.gmatch(ARGV[11], '[^ ]+') do offsets[#offsets + 1] = offset end
end
-- The offsets ascend: where the first is new, all are.
if is_from_bus and count > 0 and not is_behind(ARGV[11], stored) then read_offsets() end

-- The functions for records are made only for a task that has a record already, or is not like most: each costs every
-- call that makes it.
local function make_records()
  -- include lib/record.lua
  -- The record of a new task; nil when SQL has credited all its workers. Elements of an earlier epoch may still be in
  -- a lane, also when the record of that epoch is forgotten: they never count, because their offers are lower.
  local function new(task, past)
    local t = {'L', task.num, 0, {}, {}, {}, 0}
    if task.epoch > 0 then
      t[EPOCH], t[OFFER], t[PAST] = task.epoch, first_offer(task.epoch), past
      task.offer = t[OFFER]
    end
    for _, worker in ipairs(task.credited) do
      table.insert(t[CREDITED], worker)
      table.insert(t[CREDITED], '0')
    end
    if left(t) <= 0 then return nil end
    if task.due then t[WAIT] = {''} end
    return save(t)
  end
  -- Gives a task that ended before it was sent again a record and an element of its epoch. Returns whether it did. The
  -- list of final records keeps the entry of that end.
  local function revive(id, t, task)
    if t[ST] == 'L' or not task or task.epoch <= (t[EPOCH] or 0) then return false end
    -- A credit whose report is still on its way to SQL.
    local credited = {}
    for _, worker in ipairs(task.credited) do credited[worker] = true end
    for i = 1, #t[CREDITED], 2 do
      if not credited[t[CREDITED][i]] then table.insert(task.credited, t[CREDITED][i]) end
    end
    task.record = new(task, (t[PAST] or 0) + 1)
    return task.record and true or false
  end
  return load, new, revive
end
local load, new, revive
if 18 + 2 * count < #ARGV then
  -- include lib/clock.lua
  load, new, revive = make_records()
  for a = 15 + 2 * count, #ARGV - 4, 5 do
    local task = {num = tonumber(ARGV[a + 1]), due = tonumber(ARGV[a + 2]) > now and ARGV[a + 2],
      credited = ARGV[a + 3] ~= '' and cmsgpack.unpack(ARGV[a + 3]) or {}, epoch = tonumber(ARGV[a + 4])}
    task.record = new(task)
    others[tonumber(ARGV[a])] = task
  end
end
local limits = nil
-- include lib/limits.lua
-- include lib/head.lua
local of_limits = limits and limits()
if limits then of_limits.set_queue(ARGV[#ARGV]) end
local any_limited = false
-- An element is msgpack [NUM, offer, id].
local like_most = {num = tonumber(ARGV[12]), record = ARGV[12]}
local function prefix_of(task)
  task.prefix = string.sub(cmsgpack.pack({task.num, task.offer or 0, ids[1]}), 1, -17)
  return task.prefix
end

-- A task to which nothing has happened has only a body. To ask for the bodies of all at once is cheap where most have
-- none, and none is large.
local records, bodies = {}, nil
if count > 0 then
  records = redis.call('HMGET', RECORDS, unpack(ids))
  if big <= LARGE then bodies = redis.call('HMGET', BODIES, unpack(ids)) end
end
-- The limit keys of the tasks.
local limits_of = nil
if limits then
  limits_of = {}
  local keys = {}
  for i = 1, count do
    local _, limit = limited_head(ARGV[14 + 2 * i])
    limits_of[i] = limit or false
    if limit then keys[#keys + 1] = limit end
  end
  of_limits.read_all(keys)
end
local seen, places, record_args, delay_args, heads, elements = {}, {}, {}, {}, {}, {}
local done, known, opened, biggest = 0, 0, 0, big
for i = 1, count do
  local id = ids[i]
  if offsets and not is_behind(offsets[i], stored) then
    known = known + 1
  else
    local is_known, was_live = seen[id], 0
    if records[i] and not is_known then
      if not load then load, new, revive = make_records() end
      local t = load(records[i])
      is_known = t and not revive(id, t, others[i])
      -- One that cannot be read and has a body counts as live already.
      if not t then was_live = redis.call('HEXISTS', BODIES, id) end
    elseif not is_known then
      if bodies then is_known = bodies[i] else is_known = redis.call('HEXISTS', BODIES, id) == 1 end
    end
    if is_known then
      known = known + 1
    else
      local task, body, limit, is_crowded = others[i] or like_most, ARGV[14 + 2 * i], nil, nil
      if limits then
        limit = limits_of[i] or nil
        if limit and task.record and not task.due then
          local most = of_limits.most_waiting(bytes, high_bytes, live, most_live)
          is_crowded = of_limits.crowds(limit, i, most, ARGV[13] == '1')
          if is_crowded then
            -- Neither added nor known. The offset stays until the caller has put it into SQL.
            task, known, is_from_bus = {}, known - 1, false
          end
        end
      end
      -- What goes to SQL needs no room.
      if (ahead >= high_tasks and not limit or bytes >= high_bytes or live >= most_live) and not is_crowded then break end
      if task.record then
        seen[id] = true
        local priority = string.byte(body) or 0
        local lane = elements[priority]
        if not lane then
          -- Before the first write. The fanout sends such a record to `dead-letters` instead.
          if priority < 1 or priority > 3 then return redis.error_reply('BADTASK priority ' .. priority) end
          lane = {}
          elements[priority] = lane
        end
        local size, added = #body, #places
        local record = task.record
        if limit then
          any_limited = true
          -- One whose record cannot be read may be leased.
          if records[i] and not load(records[i]) then of_limits.forget(limit, id) end
          if record ~= '1' then record = 'k' .. limit .. record end
        end
        if task.due then
          delay_args[#delay_args + 1], delay_args[#delay_args + 2] = task.due, id
        elseif limit then
          of_limits.admit(limit, id, task.num, task.offer or 0, priority)
          opened = opened + 1
          bytes = bytes + size + OVERHEAD
        else
          lane[#lane + 1] = (task.prefix or prefix_of(task)) .. id
          opened, ahead = opened + 1, ahead + 1
          bytes = bytes + size + OVERHEAD
        end
        places[added + 1] = i
        -- One that cannot be read is replaced.
        if record ~= '1' or records[i] then
          record_args[#record_args + 1], record_args[#record_args + 2] = id, record
        end
        if size > LARGE then
          local head = string.byte(body, HEAD + 1) == OWN and HEAD + OWN_BYTES or HEAD
          if limits then head = head_length(body) end
          heads[#heads + 1], heads[#heads + 2] = id .. 'h', string.sub(body, 1, head)
        end
        if size > biggest then biggest = size end
        live = live + 1 - was_live
      else
        known = known + 1
      end
    end
  end
  done = i
end

local added = #places
if added > 0 then
  if added == count then
    redis.call('HSET', BODIES, unpack(ARGV, 15, 14 + 2 * count))
  else
    local body_args = {}
    for k = 1, added do
      body_args[2 * k - 1], body_args[2 * k] = ids[places[k]], ARGV[14 + 2 * places[k]]
    end
    redis.call('HSET', BODIES, unpack(body_args))
  end
  if #heads > 0 then redis.call('HSET', BODIES, unpack(heads)) end
  if #record_args > 0 then redis.call('HSET', RECORDS, unpack(record_args)) end
  if #delay_args > 0 then redis.call('ZADD', DELAYED, unpack(delay_args)) end
  for priority = 1, 3 do
    local lane = elements[priority]
    if lane and #lane > 0 then redis.call('LPUSH', KEYS[T + 6 * priority], unpack(lane)) end
  end
end
local fields = {}
if added > 0 then fields = {'live', live} end
if opened > 0 then
  fields = {'live', live, 'open', (counters[5] or 0) + opened, 'open_bytes', bytes}
end
if biggest > big then fields[#fields + 1], fields[#fields + 2] = 'largest_body', biggest end
if epoch > known_epoch then fields[#fields + 1], fields[#fields + 2] = 'epoch', ARGV[9] end
if added > 0 and ARGV[13] == '1' then fields[#fields + 1], fields[#fields + 2] = 'fence', (counters[6] or 0) + 1 end
if any_limited then redis.call('HSETNX', COUNTERS, 'limited', string.format('%.0f', limits().now)) end
if #fields > 0 then redis.call('HSET', COUNTERS, unpack(fields)) end

local reached = ARGV[6]
if is_from_bus and done < count then
  if not offsets then read_offsets() end
  reached = offsets[done]
end
if is_from_bus and reached and is_behind(reached, stored) then redis.call('SET', OFFSET, topic .. reached) end
-- Also for a task that waits for its time: the watchdog looks when the task is due.
if added > 0 then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
if limits then return {'ok', done, added, known, settle_limits() or -1, limits().crowded_places} end
return {'ok', done, added, known}
