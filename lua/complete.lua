-- Credits workers with tasks they hold, and puts what they report into the outbox, in one step: a completion that was answered OK is in
-- the outbox, and nothing else is. A repeat with the same token is answered OK again and changes nothing.
--
-- ARGV[2] outbox bytes at which completions are refused, far above those at which claims pause
-- ARGV[3…] per item 6 values: id, generation, grant, worker, attempt, report (opaque)
-- Returns per item one of the codes: 1 OK | 2 OK, a repeat | 3 LEASE_LOST | 4 ALREADY_COMPLETED | 5 UNKNOWN_TASK | 6 CANCELLED
--       | an error FULL: nothing was changed, the workers keep their leases
local OK, REPEAT, LOST, ALREADY, UNKNOWN, CANCELLED = 1, 2, 3, 4, 5, 6

local meta = redis.call('HMGET', META, 'out', 'big')
if tonumber(meta[1] or 0) >= tonumber(ARGV[2]) then
  return redis.error_reply('FULL the outbox of the shard has all the bytes that it may have')
end

local ids, records = {}, {}
for a = 3, #ARGV, 6 do ids[#ids + 1] = ARGV[a] end
for i, record in ipairs(hmget(REC, ids)) do records[ids[i]] = record end

local codes, reports, changed, ended_leases, finals = {}, {}, {}, {}, {}
local report_bytes = 0
for i, id in ipairs(ids) do
  local a = 3 + (i - 1) * 6
  local life, grant, worker, attempt, report = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4], ARGV[a + 5]
  local record = records[id]
  local code
  if not record then
    code = UNKNOWN
  elseif life ~= generation then
    code = LOST
  elseif attempt == '1' and record == 'h' .. grant .. ':' .. worker then
    -- The common case, without unpacking: NUM = 1, first try.
    code = OK
    records[id] = 'f' .. now .. ':' .. grant .. ':' .. worker
    finals[#finals + 1] = id
  else
    local t = load(record)
    local before = t and find_worker(t[CREDITED], worker)
    local held = t and find_grant(t[HELD], grant)
    if not t then
      code = LOST
    elseif before and t[CREDITED][before + 1] == grant then
      code = REPEAT
    elseif t[ST] == 'X' then
      code = CANCELLED
    elseif t[ST] == 'F' or before then
      code = ALREADY
    elseif not held or t[HELD][held] ~= worker or tonumber(attempt) > t[FAILS] + 1 then
      code = LOST
    else
      code = OK
      remove_pair(t[HELD], held)
      table.insert(t[CREDITED], worker)
      table.insert(t[CREDITED], grant)
      if #t[CREDITED] / 2 >= t[NUM] then
        t[ST], t[AT], t[FAILED], t[LOG] = 'F', now, nil, nil
        finals[#finals + 1] = id
      end
      records[id] = save(t)
    end
  end
  if code == OK then
    changed[id] = true
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
  if tonumber(meta[2] or 0) > LARGE then
    bodies = {}
    for _, id in ipairs(finals) do
      bodies[#bodies + 1] = id
      bodies[#bodies + 1] = id .. 'h'
    end
  end
  call_all('HSET', REC, record_args)
  call_all('ZREM', LEASE, ended_leases)
  call_all('HDEL', BODY, bodies)
  call_all('RPUSH', FINAL, finals)
  count('live', -#finals)
  count('out', report_bytes)
  -- One entry for the call, not one per task: its time is the completions' time.
  for from = 1, #reports, 6000 do
    redis.call('XADD', OUT, '*', unpack(reports, from, math.min(from + 5999, #reports)))
  end
end
return codes
