
-- Records and elements. claim.lua, complete.lua and finals.lua read and write the forms that are text by themselves;
-- everything else goes through load() and save().
--
-- A record says who completed a task, who holds it, what is in backoff, and how the task ended. The common forms are
-- short:
--   none, and there is a body   live, NUM = 1, nothing has happened yet: most tasks that wait
--   '3'                       live, NUM = 3, nothing has happened yet
--   'h<grant>:<worker>'       NUM = 1, held, never rejected
--   'f<ms>:<grant>:<worker>'  NUM = 1, completed at ms
--   'm<3 bytes>' entries      NUM > 1, live, never rejected; the bytes are NUM, how many hold it, how many are credited
--   'e<1 byte><ms>' entries   NUM > 1, completed at ms, never rejected; the byte is NUM
--     entries: '\n', then per worker '<worker>\t<h held | c credited><grant>\n'; names have no control characters
--   'k<8 bytes>' and one of the forms above or below: live, of a task with a limit key; the bytes are of its hash
--   msgpack                   [status, NUM, failures, {grant, …} in backoff or {''} before its time,
--                              {worker, grant, …} credited, {worker, grant, …} held, final at ms, newest offer,
--                              {worker, failures, …}, {ms, worker, reason, …}, epoch of the task,
--                              {worker, ms}, past ends]
-- status: L live, F completed, D dead, X cancelled. save() leaves out the last six if they are nil.
-- A record with an epoch, of a task that was sent again or reserved, is always msgpack and has all
-- of them but the last two.
-- FAILED counts failures by worker if NUM > 1: a worker with max_attempts failures (then REFUSED)
-- is not offered the task again, so that one worker alone cannot kill it. If a task was requeued
-- away from a worker, the worker is REFUSED, too, whatever NUM is, and a second pair after that one
-- says how often it had failed. LOG holds the last failures.
-- FAILED also contains the workers that rest from the task: a tab (which no name contains) and the
-- name, and until when (ms). They gave it back before they had started it, and others come first.
-- RESERVED names the only worker that may get the task, and until when (ms).
-- PAST counts the entries in the list of final records that are of earlier ends of the task. A task
-- that is sent again leaves them there, because a search for one would pass the whole list. They
-- come before the entry of its present end. finals.lua and forget.lua drop them and decrement PAST.
local ST, NUM, FAILS, WAIT, CREDITED, HELD, AT, OFFER, FAILED, LOG, EPOCH, RESERVED, PAST =
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13
local REFUSED = -1

-- Scripts calculate with these values and index these lists. A record with anything else in their
-- place is damaged.
local function is_count(n) return type(n) == 'number' and n >= 0 and n < 2 ^ 53 end
local function is_pairs(list, kind)
  if type(list) ~= 'table' or #list % 2 > 0 then return false end
  for i = 1, #list, 2 do
    local value = list[i + 1]
    if type(list[i]) ~= 'string' or type(value) ~= kind or kind == 'number' and value < REFUSED then return false end
  end
  return true
end
local function is_text(list)
  if type(list) ~= 'table' then return false end
  for i = 1, #list do if type(list[i]) ~= 'string' then return false end end
  return true
end
local function is_record(t)
  return type(t) == 'table' and type(t[ST]) == 'string' and is_count(t[NUM]) and is_count(t[FAILS])
    and is_text(t[WAIT]) and is_pairs(t[CREDITED], 'string') and is_pairs(t[HELD], 'string') and is_count(t[AT])
    and is_count(t[OFFER] or 0) and is_pairs(t[FAILED] or {}, 'number') and type(t[LOG] or {}) == 'table'
    and is_count(t[EPOCH] or 0) and is_pairs(t[RESERVED] or {}, 'number') and is_count(t[PAST] or 0)
end

-- The record of a task that has no entry in RECORDS: '1' if it has a body, else false.
local function fresh(id) return redis.call('HEXISTS', BODIES, id) == 1 and '1' end
local function record_of(id) return redis.call('HGET', RECORDS, id) or fresh(id) end

-- Returns a false value for a damaged record. `limit` of the result is the first 8 bytes of the
-- hash of the limit key, if the task has one.
local function load(r)
  local form = string.byte(r) or 0
  if form >= 48 and form <= 57 then
    local num = tonumber(r)
    return num and {'L', num, 0, {}, {}, {}, 0}
  end
  if form == 104 then
    local grant, worker = string.match(r, '^h(%d+):(.*)$')
    return grant and {'L', 1, 0, {}, {}, {worker, grant}, 0}
  end
  if form == 102 then
    local at, grant, worker = string.match(r, '^f(%d+):(%d+):(.*)$')
    return at and {'F', 1, 0, {}, {worker, grant}, {}, tonumber(at)}
  end
  if form == 109 or form == 101 then
    local num, held, credited = string.byte(r, 2, 4)
    local at = form == 101 and tonumber(string.match(r, '^%d+', 3)) or 0
    local t = {form == 109 and 'L' or 'F', num, 0, {}, {}, {}, at}
    for worker, state, grant in string.gmatch(string.sub(r, form == 109 and 5 or 3), '([^\t\n]+)\t([hc])(%d+)\n') do
      local list = state == 'h' and t[HELD] or t[CREDITED]
      list[#list + 1], list[#list + 2] = worker, grant
    end
    if form == 101 then held, credited = 0, num end
    return credited and #t[HELD] == 2 * held and #t[CREDITED] == 2 * credited and t
  end
  if form == 107 then
    local t = #r > 9 and load(string.sub(r, 10))
    if not t or t[ST] ~= 'L' then return nil end
    t.limit = string.sub(r, 2, 9)
    return t
  end
  local ok, t = pcall(cmsgpack.unpack, r)
  return ok and is_record(t) and t or nil
end

local function entries_of(t)
  local entries = {''}
  for i = 1, #t[CREDITED], 2 do entries[#entries + 1] = t[CREDITED][i] .. '\tc' .. t[CREDITED][i + 1] end
  for i = 1, #t[HELD], 2 do entries[#entries + 1] = t[HELD][i] .. '\th' .. t[HELD][i + 1] end
  entries[#entries + 1] = ''
  return table.concat(entries, '\n')
end

local function save(t)
  if t.limit then
    local limit = t.limit
    t.limit = nil
    local text = save(t)
    t.limit = limit
    return t[ST] == 'L' and 'k' .. limit .. text or text
  end
  if t[EPOCH] then
    t[OFFER], t[FAILED], t[LOG] = t[OFFER] or 0, t[FAILED] or {}, t[LOG] or {}
    if t[PAST] then t[RESERVED] = t[RESERVED] or false elseif not t[RESERVED] then t[RESERVED] = nil end
    return cmsgpack.pack(t)
  end
  -- A lower NUM may have completed the task with more credits than NUM.
  local fits = #t[CREDITED] == 2 * t[NUM]
  if t[ST] == 'F' and t[NUM] == 1 and fits then
    return 'f' .. t[AT] .. ':' .. t[CREDITED][2] .. ':' .. t[CREDITED][1]
  end
  local bars = t[FAILED] and #t[FAILED] > 0
  if t[ST] == 'L' and t[FAILS] == 0 and #t[WAIT] == 0 and (t[OFFER] or 0) == 0 and not bars then
    if #t[HELD] + #t[CREDITED] == 0 then return tostring(t[NUM]) end
    if t[NUM] == 1 then return 'h' .. t[HELD][2] .. ':' .. t[HELD][1] end
    if t[NUM] <= 255 then return string.char(109, t[NUM], #t[HELD] / 2, #t[CREDITED] / 2) .. entries_of(t) end
  end
  if t[ST] == 'F' and t[FAILS] == 0 and t[NUM] <= 255 and fits then
    return string.char(101, t[NUM]) .. t[AT] .. entries_of(t)
  end
  return cmsgpack.pack(t)
end

-- Decrements the past ends of the task, if there are any. Returns whether there were.
local function drop_past_end(t)
  if not t or (t[PAST] or 0) < 1 then return false end
  t[PAST] = t[PAST] > 1 and t[PAST] - 1 or nil
  return true
end

-- How many replicas may still be handed out.
local function left(t)
  if t[ST] ~= 'L' or t[WAIT][1] == '' then return 0 end
  return t[NUM] - #t[CREDITED] / 2 - #t[HELD] / 2 - #t[WAIT]
end

-- How many replicas wait for their time or their backoff.
local function waiting(t)
  return t[WAIT][1] == '' and t[NUM] - #t[CREDITED] / 2 or #t[WAIT]
end

-- Returns the index of the worker in a flat list of pairs that begin with a worker.
local function find_worker(list, worker)
  for i = 1, #list, 2 do if list[i] == worker then return i end end
end

-- Whether the worker has failed the task as often as it may, or an operator took the task from it.
local function is_refused(t, worker)
  local at = t[FAILED] and find_worker(t[FAILED], worker)
  return at and t[FAILED][at + 1] == REFUSED
end

-- Returns until when the worker rests from the task (ms), or 0 if it does not.
local function rests_until(t, worker)
  local at = t[FAILED] and find_worker(t[FAILED], '\t' .. worker)
  return at and t[FAILED][at + 1] or 0
end

-- Returns why the worker is ineligible for the task at `now` (ms), or nil if it may get it.
-- claim.lua decides by this, and explain.lua shows it. For records in text form, claim.lua comes to
-- the same answer by itself.
--   'completed'  the worker has completed it
--   'final'      the task is over   'holds' the worker holds a replica
--   'refused'    the worker has failed it as often as it may, or an operator took it from the worker
--   'reserved'   it is reserved for another worker
--   'scheduled'  its time has not come
--   'backoff'    all replicas that are left wait for their backoff   'leased' other workers hold all that are left
--   'rests'      the worker gave it back a moment ago, and others come first
local function bar(t, worker, now)
  if find_worker(t[CREDITED], worker) then return 'completed' end
  if t[ST] ~= 'L' then return 'final' end
  if find_worker(t[HELD], worker) then return 'holds' end
  if is_refused(t, worker) then return 'refused' end
  if t[RESERVED] and t[RESERVED][1] ~= worker then return 'reserved' end
  if t[WAIT][1] == '' then return 'scheduled' end
  if left(t) <= 0 then return #t[HELD] == 0 and 'backoff' or 'leased' end
  if rests_until(t, worker) > now then return 'rests' end
end

-- An element is msgpack [NUM, offer, id], so the id is its last 16 bytes; of a task with a limit key
-- [NUM, offer, 8 bytes of the limit key's hash, id]. Offer 0 is a new task's first element. Each
-- replica that comes back is a new offer in a new element. Only the newest element counts, because no worker has
-- passed it.
local function element(num, offer, id, limit)
  if limit then return cmsgpack.pack({num, offer, limit, id}) end
  return cmsgpack.pack({num, offer, id})
end
local function id_of(element) return string.sub(element, -16) end

-- The first offer of a task that was sent again. It is higher than any offer of an earlier epoch,
-- because elements of that epoch may still be in a lane after its record is forgotten. Offers stay
-- below 2^53, up to which numbers in Lua are exact.
local function first_offer(epoch) return math.min(epoch, 2 ^ 20) * 2 ^ 32 end

-- Whether the element is the one that offers what is left of the task.
local function is_offer(t, element)
  local offer = t[OFFER] or 0
  return offer == 0 or cmsgpack.unpack(element)[2] == offer
end
