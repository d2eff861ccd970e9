-- Reads what the shard knows of one task, and why a worker may not get it. Changes nothing.
--
-- ARGV[2] id   ARGV[3] worker, '' one that never had the task   ARGV[4] the task's priority (1 to 3)
-- ARGV[5] elements of its lane to search, at most
-- Returns {now (ms), stored offset with its topic generation or '', outbox entries, outbox bytes, leases, record}
--   record: 0 no record, or a damaged one
--     | {status L|F|D|X, NUM, failures, waiting, final at (ms), epoch of the task, credited workers, leases, due times
--        (ms), last failures, bar, elements before it, elements before it for the worker,
--        reservation, limit}
--   reservation: {worker, until (ms)}, {} none
--   limit: of a task that waits behind its limit key, show() of lib/limits.lua, {} otherwise
--   leases: {worker, deadline (ms) or -1, undelivered 0|1, beginning (ms) or -1, …}
--   last failures: {ms, worker, reason, …}
--   bar: as bar() of lib/record.lua, '' the worker may get the task
--   elements before it: the elements of its priority that a claim by a new worker, or by this one,
--   meets first; -1 its element was not found
local id, worker = ARGV[2], ARGV[3]
local record = record_of(id)
local t = record and load(record)
if t and record == '1' then
  local size = redis.call('HSTRLEN', BODIES, id)
  local _, limit = limited_head(redis.call('HGET', BODIES, size > LARGE and id .. 'h' or id) or '')
  t.limit = limit
end
local answer = {now, redis.call('GET', OFFSET) or '', redis.call('XLEN', OUTBOX),
  tonumber(redis.call('HGET', COUNTERS, 'outbox_bytes') or 0), redis.call('ZCARD', LEASES), 0}
-- A damaged record counts as none: the reconciler brings the task back.
if not t then return answer end

local credited, leases, due = {}, {}, {}
for i = 1, #t[CREDITED], 2 do credited[#credited + 1] = t[CREDITED][i] end
for i = 1, #t[HELD], 2 do
  local grant = t[HELD][i + 1]
  leases[#leases + 1] = t[HELD][i]
  local deadline = tonumber(redis.call('ZSCORE', LEASES, id .. grant) or nil)
  leases[#leases + 1] = deadline and math.ceil(deadline) or -1
  leases[#leases + 1] = redis.call('ZSCORE', UNDELIVERED, grant) and 1 or 0
  leases[#leases + 1] = began(id, deadline) or -1
end
for _, grant in ipairs(t[WAIT]) do
  local at = redis.call('ZSCORE', DELAYED, id .. grant)
  if at then due[#due + 1] = tonumber(at) end
end

-- How many elements of the lane's first `count` the worker has yet to pass.
local function unpassed(lane, count)
  local pointer = redis.call('HGET', P(lane), worker)
  if not pointer then return count end
  return math.max(count - math.max(pointer - (redis.call('GET', C(lane)) or 0), 0), 0)
end

-- A replica that was given back is in the retry lane of its priority, which claims read first. A
-- new task is in the other lane, and so is one that was sent again.
local before, before_worker, limit = -1, -1, {}
if left(t) > 0 then
  local offer = t[OFFER] or 0
  local lane, sought = lane_of(tonumber(ARGV[4]), false), element(t[NUM], offer, id, t.limit)
  local function find(lane) return redis.call('LPOS', T(lane), sought, 'RANK', -1, 'MAXLEN', ARGV[5]) end
  local retry_at = offer > 0 and find(lane - 1)
  local at = retry_at or find(lane)
  if at then
    if retry_at then lane = lane - 1 end
    before = redis.call('LLEN', T(lane)) - 1 - at
    before_worker = unpassed(lane, before)
    if not retry_at then
      local retries = redis.call('LLEN', T(lane - 1))
      before, before_worker = before + retries, before_worker + unpassed(lane - 1, retries)
    end
  elseif t.limit then
    limit = limits().show(t.limit, id, offer, tonumber(ARGV[4]), tonumber(ARGV[5])) or {}
  end
end
answer[6] = {t[ST], t[NUM], t[FAILS], waiting(t), t[AT], t[EPOCH] or 0, credited, leases, due, t[LOG] or {},
  bar(t, worker, now) or '', before, before_worker, t[RESERVED] or {}, limit}
return answer
