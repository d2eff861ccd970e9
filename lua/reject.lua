-- Ends leases without a result: a worker rejects its task, or taskd releases a lease that it could not deliver.
--
-- ARGV[2] seed of the jitter   ARGV[3] wake channel   ARGV[4] the wake: queue, and perhaps a process
-- ARGV[5] backoff as msgpack array of ms
-- ARGV[6] outbox bytes at which failed attempts are not reported: a report must not fill Redis
-- then per item 8 values: id, generation, grant, worker, mode, delay (ms, '' = the backoff), reason, failed attempt
--   mode: 'retry' counts one failure | 'never' counts max_attempts
--     | 'release' (not delivered) counts none and offers the task at once
--     | 'put_off' counts none and waits for the delay
--     | 'rest' (not started) counts none and offers the task at once, but to this worker only after
--       the delay
--   The mode may be followed by two numbers, a report about the limit key: a hold, and the time
--   between two starts (ms, 0 none)
--   failed attempt: for the task's history, as the record of the bus has it (opaque), '' none
-- Returns per item {code, dead 0|1}; lib/held.lua names the codes
math.randomseed(tonumber(ARGV[2]))
local policy = cmsgpack.unpack(ARGV[5])
local answers, offered, failed = {}, false, {}

-- Makes the worker rest from the task. Removes rests that are over, and the earliest ones if there
-- are too many.
local MOST_RESTS = 16
local function rest(t, worker, until_ms)
  local list, rests = {}, {}
  for i = 1, #(t[FAILED] or {}), 2 do
    local name, value = t[FAILED][i], t[FAILED][i + 1]
    local to = string.byte(name) == 9 and rests or list
    if to == list or value > now and name ~= '\t' .. worker then to[#to + 1], to[#to + 2] = name, value end
  end
  rests[#rests + 1], rests[#rests + 2] = '\t' .. worker, until_ms
  for i = math.max(1, #rests - 2 * MOST_RESTS + 1), #rests do list[#list + 1] = rests[i] end
  t[OFFER], t[FAILED] = t[OFFER] or 0, list
end

for a = 7, #ARGV, 8 do
  local id, grant, mode, dead = ARGV[a], ARGV[a + 2], ARGV[a + 4], 0
  local limit_hold, limit_pace = 0, 0
  if string.find(mode, ' ', 1, true) then
    mode, limit_hold, limit_pace = string.match(mode, '^(%S+) (%d+) (%d+)$')
    limit_hold, limit_pace = tonumber(limit_hold), tonumber(limit_pace)
  end
  local record = record_of(id)
  local code, t, at = held(record, ARGV[a + 1], grant, ARGV[a + 3])
  if code == OK and limit_hold + limit_pace > 0 and not t.limit then code = NOT_LIMITED end
  if code == OK then
    if limit_hold + limit_pace > 0 then limits().report(t.limit, limit_hold, limit_pace) end
    local cost, delay = 1, tonumber(ARGV[a + 5])
    if mode == 'never' then cost = -1 end
    if mode == 'release' then
      cost, delay = 0, 0
      redis.call('ZREM', UNDELIVERED, grant)
    elseif mode == 'put_off' then
      cost = 0
    elseif mode == 'rest' then
      rest(t, ARGV[a + 3], now + delay)
      cost, delay = 0, 0
    end
    local outcome = reject(id, t, at, cost, delay, policy, ARGV[a + 6])
    redis.call('HSET', RECORDS, id, save(t))
    offered = offered or outcome == now
    dead = outcome == 'dead' and 1 or 0
    if ARGV[a + 7] ~= '' then failed[#failed + 1] = ARGV[a + 7] end
  elseif record and not t then
    drop_damaged(id, record)
  end
  answers[#answers + 1] = {code, dead}
end
if #failed > 0 and tonumber(redis.call('HGET', COUNTERS, 'outbox_bytes') or 0) < tonumber(ARGV[6]) then
  report_framed(table.concat(failed))
end
write_reports()
settle_limits()
if offered then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
return answers
