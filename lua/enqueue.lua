-- Puts tasks from `pipeline` into the shard and stores how far the shard has read, in one step. So each record is
-- enqueued exactly once, however often it is read. A task that has a record, live or final, is ignored: the bus may
-- carry it twice, at different offsets. A record that cannot be read counts as none.
-- The epoch of a partition's owner is higher than that of the owner before. A caller with a lower one has lost the
-- partition.
--
-- ARGV[2] wake channel   ARGV[3] queue   ARGV[4] topic generation
-- ARGV[5] offset of the record of this queue that the caller enqueued last ('' unknown): refuses when the stored offset
--         is behind it
-- ARGV[6] offset to store when every task was dealt with   ARGV[7] high water in tasks   ARGV[8] in bytes
-- ARGV[9] epoch   ARGV[10] live tasks at most, whatever they wait for
-- then per task, in the order of the partition, 6 values:
--   offset, id, NUM, not_before (ms, 0 at once), body, credited workers as msgpack array ('' none)
-- Returns {'fenced', epoch of the present owner}: nothing was changed
--       | {'behind', stored offset or ''}: Redis fell back, nothing was changed, seek there
--       | {'ok', dealt with, added, known}: when fewer were dealt with than given, the queue is full at the next one
--       | an error BADTASK for a body without a known priority: nothing was changed
local function parse(offset)
  local major, minor = string.match(offset, '^(%d+)%-(%d+)$')
  return tonumber(major), tonumber(minor)
end
local function at_or_before(a_major, a_minor, b_major, b_minor)
  return a_major < b_major or (a_major == b_major and a_minor <= b_minor)
end

local counters = redis.call('HMGET', COUNTERS, 'open_bytes', 'largest_body', 'epoch', 'live')
local epoch, known_epoch = tonumber(ARGV[9]), tonumber(counters[3] or 0)
if epoch < known_epoch then return {'fenced', known_epoch} end

local topic = ARGV[4]
local stored_major, stored_minor = -1, 0
local stored = redis.call('GET', OFFSET)
if stored and string.sub(stored, 1, #topic + 1) == topic .. '/' then
  stored = string.sub(stored, #topic + 2)
  stored_major, stored_minor = parse(stored)
else
  stored = ''
end
if ARGV[5] ~= '' then
  local major, minor = parse(ARGV[5])
  if not at_or_before(major, minor, stored_major, stored_minor) then return {'behind', stored} end
end

-- The queue is full by what the foremost worker still has ahead, so that a slow worker does not starve the others.
-- Tasks that wait for their time or their backoff are ahead of no worker. They, and what slow workers have left, count
-- against a bound of their own.
local ahead = 0
for lane = 1, 6 do
  local length = redis.call('LLEN', T(lane))
  if length > 0 then
    local gone = tonumber(redis.call('GET', C(lane)) or 0)
    local front = tonumber(redis.call('HGET', COUNTERS, 'front' .. lane) or 0)
    ahead = ahead + math.min(length, length + gone - front)
  end
end
local bytes, big, live = tonumber(counters[1] or 0), tonumber(counters[2] or 0), tonumber(counters[4] or 0)
local high_tasks, high_bytes, most_live = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[10])

local ids = {}
for a = 11, #ARGV, 6 do ids[#ids + 1] = ARGV[a + 1] end
local records = hmget(RECORDS, ids)

local seen, record_args, body_args, delay_args, elements = {}, {}, {}, {}, {{}, {}, {}, {}, {}, {}}
local done, added, known, opened, added_bytes, biggest = 0, 0, 0, 0, 0, big
local last_major, last_minor = stored_major, stored_minor
for i, id in ipairs(ids) do
  local a = 11 + (i - 1) * 6
  local major, minor = parse(ARGV[a])
  if at_or_before(major, minor, stored_major, stored_minor) then
    known = known + 1
  elseif seen[id] or records[i] and load(records[i]) then
    known = known + 1
    last_major, last_minor = major, minor
  else
    if ahead >= high_tasks or bytes >= high_bytes or live >= most_live then break end
    local num, not_before, body = tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]), ARGV[a + 4]
    local credited = {}
    if ARGV[a + 5] ~= '' then
      for _, worker in ipairs(cmsgpack.unpack(ARGV[a + 5])) do
        credited[#credited + 1] = worker
        credited[#credited + 1] = '0'
      end
    end
    local t = {'L', num, 0, {}, credited, {}, 0}
    if left(t) > 0 then
      seen[id] = true
      local priority = string.byte(body) or 0
      -- Before the first write. The fanout sends such a record to `dead-letters`.
      if not is_priority(priority) then return redis.error_reply('BADTASK priority ' .. priority) end
      local lane = lane_of(priority, false)
      if not_before > now then
        t[WAIT] = {''}
        delay_args[#delay_args + 1] = not_before
        delay_args[#delay_args + 1] = id
      else
        table.insert(elements[lane], element(num, 0, id))
        opened, ahead = opened + 1, ahead + 1
        bytes, added_bytes = bytes + #body + OVERHEAD, added_bytes + #body + OVERHEAD
      end
      table.insert(record_args, id)
      table.insert(record_args, save(t))
      table.insert(body_args, id)
      table.insert(body_args, body)
      if #body > LARGE then
        table.insert(body_args, id .. 'h')
        table.insert(body_args, string.sub(body, 1, HEAD))
      end
      added, live = added + 1, live + 1
      biggest = math.max(biggest, #body)
    else
      known = known + 1
    end
    last_major, last_minor = major, minor
  end
  done = done + 1
end

if epoch > known_epoch then redis.call('HSET', COUNTERS, 'epoch', ARGV[9]) end
call_all('HSET', BODIES, body_args)
call_all('HSET', RECORDS, record_args)
call_all('ZADD', DELAYED, delay_args)
for lane = 1, 6 do call_all('LPUSH', T(lane), elements[lane]) end
count('open', opened)
count('live', added)
count('open_bytes', added_bytes)
if biggest > big then redis.call('HSET', COUNTERS, 'largest_body', biggest) end
if done == #ids and ARGV[6] ~= '' then
  local major, minor = parse(ARGV[6])
  if not at_or_before(major, minor, last_major, last_minor) then last_major, last_minor = major, minor end
end
if not at_or_before(last_major, last_minor, stored_major, stored_minor) then
  redis.call('SET', OFFSET, string.format('%s/%.0f-%.0f', topic, last_major, last_minor))
end
-- Also for a task that waits for its time: the watchdog looks when the task is due.
if added > 0 then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return {'ok', done, added, known}
