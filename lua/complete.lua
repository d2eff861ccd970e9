-- Credits workers with tasks that they hold, and puts their reports into the outbox, in one step: the outbox has the
-- report of every completion that was answered OK, and no other. A repeat with the same token is answered REPEAT and
-- changes nothing.
--
-- ARGV[2] outbox bytes at which completions are refused, far above those at which claims pause
-- ARGV[3…] per item 6 values: id, generation, grant, worker, attempt, report (opaque)
-- Returns a code per item; lib/held.lua names the codes
--       | an error FULL: nothing was changed, the workers keep their leases
local counters = redis.call('HMGET', COUNTERS, 'outbox_bytes', 'largest_body')
if tonumber(counters[1] or 0) >= tonumber(ARGV[2]) then
  return redis.error_reply('FULL the outbox of the shard has all the bytes that it may have')
end

local ids, records = {}, {}
for a = 3, #ARGV, 6 do ids[#ids + 1] = ARGV[a] end
for i, record in ipairs(hmget(RECORDS, ids)) do records[ids[i]] = record end

-- The code for a token, by the unpacked record; with the record to be when it is OK, and whether that is final.
local function credit(record, token_generation, grant, worker, attempt)
  local code, t, at = held(record, token_generation, grant, worker)
  if code ~= OK then
    local before = t and find_worker(t[CREDITED], worker)
    return before and t[CREDITED][before + 1] == grant and REPEAT or code
  end
  if tonumber(attempt) > t[FAILS] + 1 then return LEASE_LOST end
  remove_pair(t[HELD], at)
  table.insert(t[CREDITED], worker)
  table.insert(t[CREDITED], grant)
  local is_final = #t[CREDITED] / 2 >= t[NUM]
  if is_final then t[ST], t[AT], t[FAILED], t[LOG] = 'F', now, nil, nil end
  return OK, save(t), is_final
end

local codes, reports, changed, ended_leases, finals = {}, {}, {}, {}, {}
local report_bytes = 0
for i, id in ipairs(ids) do
  local a = 3 + (i - 1) * 6
  local token_generation, grant, worker, attempt, report =
    ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], ARGV[a + 5]
  local record = records[id]
  local code, after, is_final
  if record and token_generation ~= generation then
    code = LEASE_LOST
  elseif attempt == '1' and record == 'h' .. grant .. ':' .. worker then
    -- The common case, without unpacking: NUM = 1, first try.
    code, after, is_final = OK, 'f' .. now .. ':' .. grant .. ':' .. worker, true
  else
    code, after, is_final = credit(record, token_generation, grant, worker, attempt)
  end
  if code == OK then
    records[id], changed[id] = after, true
    if is_final then finals[#finals + 1] = id end
    ended_leases[#ended_leases + 1] = id .. grant
    reports[#reports + 1] = 'c'
    reports[#reports + 1] = report
    report_bytes = report_bytes + #report
  end
  codes[i] = code
end

if #reports > 0 then
  local record_args = {}
  for id in pairs(changed) do
    record_args[#record_args + 1] = id
    record_args[#record_args + 1] = records[id]
  end
  local bodies = finals
  if tonumber(counters[2] or 0) > LARGE then
    bodies = {}
    for _, id in ipairs(finals) do
      bodies[#bodies + 1] = id
      bodies[#bodies + 1] = id .. 'h'
    end
  end
  call_all('HSET', RECORDS, record_args)
  call_all('ZREM', LEASES, ended_leases)
  call_all('HDEL', BODIES, bodies)
  call_all('RPUSH', FINALS, finals)
  count('live', -#finals)
  count('outbox_bytes', report_bytes)
  -- One entry for the call, not one per task: its time is the completions' time.
  for from = 1, #reports, 6000 do
    redis.call('XADD', OUTBOX, '*', unpack(reports, from, math.min(from + 5999, #reports)))
  end
end
return codes
