-- The head of every script (but open.lua): names of the keys, the generation check, the clock, and the record: the only place that reads or
-- writes one.
--
-- KEYS[1]  <p>:{<queue>:<shard>}:g   string  generation: the number of this life of the shard; without it every call is refused
-- KEYS[2]  …:R                       hash    id -> record
-- KEYS[3]  …:B                       hash    id -> body, until the task is final: '>BI4I4' priority, max_attempts, lease (ms), then what
--                                            the worker gets
-- KEYS[4]  …:L                       zset    id .. grant, by the deadline of the lease (ms)
-- KEYS[5]  …:D                       zset    id .. grant of a replica in backoff, or the id alone of a task before its time, by when it is due (ms)
-- KEYS[6]  …:M                       hash    counters: n grants so far; open tasks with something left; live tasks not final; bytes of
--                                            bodies that wait; big the largest body so far; f<lane> the foremost pointer
-- KEYS[7]  …:S                       stream  the outbox: what happened, until it stands on the bus
-- KEYS[8]  …:F                       list    ids of final records, the earliest first, until they are forgotten
-- KEYS[9]  …:O                       string  '<topic generation>/<major>-<minor>': the last record of `pipeline` that was enqueued
-- KEYS[10+3i] …:<lane>:T  KEYS[11+3i] …:<lane>:C  KEYS[12+3i] …:<lane>:P   for the lanes i = 0…5: hr h mr m lr l
--          T list of elements msgpack [NUM, taken, id], newest at the head; C how many have ever left the tail; P hash worker -> how many
--          it has passed since the beginning of time
-- ARGV[1]  now (ms), or '' for Redis's own clock; tests set it
local GEN, REC, BODY, LEASE, DELAY, META, OUT, FINAL, OFFSET =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]

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
local function T(lane) return KEYS[7 + 3 * lane] end
local function C(lane) return KEYS[8 + 3 * lane] end
local function P(lane) return KEYS[9 + 3 * lane] end

-- An element is msgpack [NUM, taken, id]; the id is its last 16 bytes.
local function element(num, taken, id)
  return cmsgpack.pack({num, taken, id})
end

-- A record says who completed a task, who holds it, what is in backoff, and how it ended. Forms, the common ones short:
--   '3'                       live, NUM = 3, nothing has happened yet
--   'h<grant>:<worker>'       NUM = 1, held, never failed
--   'f<ms>:<grant>:<worker>'  NUM = 1, completed at ms
--   msgpack                   [status, num, fails, wait, {worker, grant, …} credited, {worker, grant, …} held, final at ms]
-- status: L live, F completed, D dead, X cancelled.
local ST, NUM, FAILS, WAIT, CREDITED, HELD, AT = 1, 2, 3, 4, 5, 6, 7

local function load(r)
  local form = string.byte(r)
  if form >= 48 and form <= 57 then return {'L', tonumber(r), 0, 0, {}, {}, 0} end
  if form == 104 then
    local grant, worker = string.match(r, '^h(%d+):(.*)$')
    return {'L', 1, 0, 0, {}, {worker, grant}, 0}
  end
  if form == 102 then
    local at, grant, worker = string.match(r, '^f(%d+):(%d+):(.*)$')
    return {'F', 1, 0, 0, {worker, grant}, {}, tonumber(at)}
  end
  return cmsgpack.unpack(r)
end

local function save(t)
  if t[ST] == 'F' and t[NUM] == 1 then return 'f' .. t[AT] .. ':' .. t[CREDITED][2] .. ':' .. t[CREDITED][1] end
  if t[ST] == 'L' and t[FAILS] == 0 and t[WAIT] == 0 and #t[CREDITED] == 0 then
    if #t[HELD] == 0 then return tostring(t[NUM]) end
    if t[NUM] == 1 then return 'h' .. t[HELD][2] .. ':' .. t[HELD][1] end
  end
  return cmsgpack.pack(t)
end

-- How many replicas may still be handed out. Every element of the task that stands in a lane offers them.
local function left(t)
  if t[ST] ~= 'L' then return 0 end
  return t[NUM] - #t[CREDITED] / 2 - #t[HELD] / 2 - t[WAIT]
end

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
