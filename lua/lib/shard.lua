-- The head of every script (but open.lua): names of the keys, the generation check, the clock, and the record: the only place that reads or
-- writes one.
--
-- KEYS[1]  <p>:{<queue>:<shard>}:g   string  generation: the number of this life of the shard; without it every call is refused
-- KEYS[2]  …:R                       hash    id -> record
-- KEYS[3]  …:B                       hash    id -> body, until the task is final: '>BI4I4' priority, max_attempts, lease (ms), then what
--                                            the worker gets
-- KEYS[4]  …:L                       zset    id .. grant, by the deadline of the lease (ms)
-- KEYS[5]  …:D                       zset    id .. grant of a replica in backoff, or the id alone of a task before its time, by when it is due (ms)
-- KEYS[6]  …:M                       hash    counters: n grants so far; open tasks with something left; live tasks not final; bytes that
--                                            open tasks weigh; big the largest body so far; out bytes in the outbox; lease and delay the
--                                            longest that were given (ms); f<lane> the foremost pointer
-- KEYS[7]  …:S                       stream  the outbox: what happened, until it stands on the bus
-- KEYS[8]  …:F                       list    ids of final records, the earliest first, until they are forgotten
-- KEYS[9]  …:O                       string  '<topic generation>/<major>-<minor>': the last record of `pipeline` that was enqueued
-- KEYS[10] …:U                       zset    grants that no process has reported as delivered, by the last deadline of their leases (ms)
-- KEYS[11+3i] …:<lane>:T  KEYS[12+3i] …:<lane>:C  KEYS[13+3i] …:<lane>:P   for the lanes i = 0…5: hr h mr m lr l
--          T list of elements msgpack [NUM, offer, id], newest at the head; C how many have ever left the tail; P hash worker -> how many
--          it has passed since the beginning of time
-- ARGV[1]  now (ms), or '' for Redis's own clock; tests set it
local GEN, REC, BODY, LEASE, DELAY, META, OUT, FINAL, OFFSET, UNSEEN =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]

local generation = redis.call('GET', GEN)
if not generation then
  return redis.error_reply('NOGEN the shard has no generation: it was never opened, or Redis lost it')
end

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Lane 1 to 6 of a priority (1 high, 2 medium, 3 low): each has its retry lane before it. A body that is damaged waits in the medium one:
-- of another number would come a key that is no lane, such as the outbox.
local function is_priority(priority) return priority >= 1 and priority <= 3 end
local function lane_of(priority, retry)
  if not is_priority(priority) then priority = 2 end
  return priority * 2 - (retry and 1 or 0)
end
local function T(lane) return KEYS[8 + 3 * lane] end
local function C(lane) return KEYS[9 + 3 * lane] end
local function P(lane) return KEYS[10 + 3 * lane] end

-- An element is msgpack; the id is its last 16 bytes. Offer 0 is a task's first element. Each replica that comes back is a new offer in a
-- new element; only the newest counts, because nobody has passed it.
local function element(num, offer, id)
  return cmsgpack.pack({num, offer, id})
end
local function id_of(element) return string.sub(element, -16) end

-- A record says who completed a task, who holds it, what is in backoff, and how it ended. Forms, the common ones short:
--   '3'                       live, NUM = 3, nothing has happened yet
--   'h<grant>:<worker>'       NUM = 1, held, never given back
--   'f<ms>:<grant>:<worker>'  NUM = 1, completed at ms
--   msgpack                   [status, num, fails, {grant, …} in backoff or {''} before its time, {worker, grant, …} credited,
--                              {worker, grant, …} held, final at ms, newest offer, {worker, failures, …}, {ms, worker, reason, …}]
-- status: L live, F completed, D dead, X cancelled. The last three are left out at their end. FAILED is kept where NUM > 1: a worker with
-- max_attempts failures (then -1) is not offered the task again, so that one worker alone cannot kill it. LOG holds the last failures.
local ST, NUM, FAILS, WAIT, CREDITED, HELD, AT, OFFER, FAILED, LOG = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local REFUSED = -1

local function is_record(t)
  return type(t) == 'table' and type(t[ST]) == 'string' and type(t[NUM]) == 'number' and type(t[FAILS]) == 'number'
    and type(t[CREDITED]) == 'table' and type(t[HELD]) == 'table' and type(t[AT]) == 'number'
end

-- nil for a record that is damaged.
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
  local ok, t = pcall(cmsgpack.unpack, r)
  if not ok or not is_record(t) then return nil end
  if type(t[WAIT]) ~= 'table' then
    -- A version before this one counted what waits, and named no grants.
    local waits = {}
    for i = 1, tonumber(t[WAIT]) or 0 do waits[i] = '?' end
    t[WAIT] = waits
  end
  return t
end

local function save(t)
  if t[ST] == 'F' and t[NUM] == 1 then return 'f' .. t[AT] .. ':' .. t[CREDITED][2] .. ':' .. t[CREDITED][1] end
  if t[ST] == 'L' and t[FAILS] == 0 and #t[WAIT] == 0 and #t[CREDITED] == 0 and (t[OFFER] or 0) == 0 then
    if #t[HELD] == 0 then return tostring(t[NUM]) end
    if t[NUM] == 1 then return 'h' .. t[HELD][2] .. ':' .. t[HELD][1] end
  end
  return cmsgpack.pack(t)
end

-- How many replicas may still be handed out.
local function left(t)
  if t[ST] ~= 'L' or t[WAIT][1] == '' then return 0 end
  return t[NUM] - #t[CREDITED] / 2 - #t[HELD] / 2 - #t[WAIT]
end

-- Whether this element is the one that offers what is left.
local function is_offer(t, element)
  local offer = t[OFFER] or 0
  return offer == 0 or cmsgpack.unpack(element)[2] == offer
end

-- What an open task weighs: its body, and about what its record, element and lease take.
local OVERHEAD = 400

-- A body above this has its head (priority, max_attempts, lease) in the field id .. 'h' too, so that nine bytes do not cost a megabyte.
local LARGE, HEAD = 1024, 9

-- Where in a flat {worker, grant, …} list the worker (or, of HELD, the grant) stands.
local function find_worker(list, worker)
  for i = 1, #list, 2 do if list[i] == worker then return i end end
end
local function find_grant(list, grant)
  for i = 2, #list, 2 do if list[i] == grant then return i - 1 end end
end
local function remove_pair(list, i)
  table.remove(list, i)
  table.remove(list, i)
end

-- Lua's stack holds near 8,000 values: longer argument lists go in pieces (an even number of values each).
local function call_all(command, key, args)
  for from = 1, #args, 6000 do
    redis.call(command, key, unpack(args, from, math.min(from + 5999, #args)))
  end
end
local function hmget(key, ids)
  local got = {}
  for from = 1, #ids, 6000 do
    local part = redis.call('HMGET', key, unpack(ids, from, math.min(from + 5999, #ids)))
    for i = 1, #part do got[from + i - 1] = part[i] end
  end
  return got
end
local function count(field, by)
  if by ~= 0 then redis.call('HINCRBY', META, field, by) end
end
