-- Credits workers with tasks that they hold, and puts their reports into the outbox, in one step: the outbox has the
-- report of every completion that was answered OK, and no other. A repeat with the same token is answered REPEAT and
-- changes nothing.
--
-- ARGV[2] outbox bytes at which completions are refused, far above those at which claims pause
-- ARGV[3] generation of the tokens   ARGV[4] ids of all items in one string; at most 1,000
-- then per item 2 values: grant and worker as the record has them, 'h<grant>:<worker>'; report (opaque)
-- then 3 values per item whose token is of another generation, or whose attempt is not the first:
--   place (from 1), generation, attempt
-- Returns a code per item; lib/held.lua names the codes
--       | an error FULL: nothing was changed, the workers keep their leases
local sub = string.sub
local counters = redis.call('HMGET', COUNTERS, 'outbox_bytes', 'largest_body', 'live')
if tonumber(counters[1] or 0) >= tonumber(ARGV[2]) then
  return redis.error_reply('FULL the outbox of the shard has all the bytes that it may have')
end

local ids, others = {}, {}
for i = 1, #ARGV[4] / 16 do ids[i] = sub(ARGV[4], 16 * i - 15, 16 * i) end
for a = 5 + 2 * #ids, #ARGV, 3 do others[tonumber(ARGV[a])] = a end
local records = #ids > 0 and redis.call('HMGET', RECORDS, unpack(ids)) or {}

-- Decides about an item that is not the common case: NUM = 1, first attempt, this generation. The functions for records
-- are made only where one is met: each costs every call that makes it.
local function make_judge()
  -- include lib/record.lua
  -- include lib/held.lua
  -- Returns the code for a token; with the record to be when it is OK, and whether that is final.
  return function(record, token_generation, token, attempt)
    if record and token_generation ~= generation then return LEASE_LOST end
    local grant, worker = string.match(token, '^h(%d+):(.*)$')
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
end
local judge

-- A batch of one worker has one token for all items: what follows from it is made once.
local is_current, completed_at = ARGV[3] == generation, 'f' .. now .. ':'
local grants, completed = {}, {}
local codes, changed, record_args, ended_leases, finals, reports, report_bytes = {}, {}, {}, {}, {}, {}, 0
for i = 1, #ids do
  local id, token, report = ids[i], ARGV[3 + 2 * i], ARGV[4 + 2 * i]
  local record, code, after, is_final = changed[id] or records[i], 1, nil, true
  if record == token and is_current and not others[i] then
    after = completed[token]
    if not after then
      after = completed_at .. sub(token, 2)
      completed[token] = after
    end
  else
    local a = others[i]
    judge = judge or make_judge()
    code, after, is_final = judge(record, a and ARGV[a + 1] or ARGV[3], token, a and ARGV[a + 2] or 1)
  end
  if after then
    local grant = grants[token]
    if not grant then
      grant = sub(token, 2, string.find(token, ':', 1, true) - 1)
      grants[token] = grant
    end
    local n = #ended_leases
    changed[id] = after
    record_args[2 * n + 1], record_args[2 * n + 2] = id, after
    ended_leases[n + 1] = id .. grant
    reports[2 * n + 1], reports[2 * n + 2] = 'c', report
    report_bytes = report_bytes + #report
    if is_final then finals[#finals + 1] = id end
  end
  codes[i] = code
end

if #ended_leases > 0 then
  redis.call('HSET', RECORDS, unpack(record_args))
  redis.call('ZREM', LEASES, unpack(ended_leases))
  local fields = {'outbox_bytes', (counters[1] or 0) + report_bytes}
  if #finals > 0 then
    local bodies = finals
    if tonumber(counters[2] or 0) > LARGE then
      bodies = {}
      for k = 1, #finals do bodies[2 * k - 1], bodies[2 * k] = finals[k], finals[k] .. 'h' end
    end
    redis.call('HDEL', BODIES, unpack(bodies))
    redis.call('RPUSH', FINALS, unpack(finals))
    fields[3], fields[4] = 'live', (counters[3] or 0) - #finals
  end
  redis.call('HSET', COUNTERS, unpack(fields))
  -- One entry for the call, not one per task: its time is the completions' time.
  redis.call('XADD', OUTBOX, '*', unpack(reports))
end
return codes
