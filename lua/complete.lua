-- Credits workers with tasks that they hold, and puts their reports into the outbox, in one step: the outbox has the
-- report of every completion that was answered OK, and no other. A repeat with the same token is answered REPEAT and
-- changes nothing.
--
-- ARGV[2] outbox bytes at which completions are refused, far above those at which claims pause
-- ARGV[3] generation of the tokens   ARGV[4] ids of all items in one string; at most 1,000
-- ARGV[5] reports of all items one after the other (opaque)
-- ARGV[6] numbers of 4 bytes each: the length of each report, then per run of items with the same grant and worker how
--   many they are
-- then per run: grant and worker as the record has them, 'h<grant>:<worker>'
-- then 3 values per item whose token is of another generation, or whose attempt is not the first:
--   place (from 1), generation, attempt; in the row for shards with limited tasks also those with a report about the
--   limit key, and 2 values more: a hold, and the time between two starts (ms, 0 none)
-- In the row for shards with limited tasks, what ends here lets others of its limit key start.
-- Returns an error LIMITED in the row for other shards: nothing was changed, ask by the other row
--       | a string: a digit per item, its code (lib/held.lua names them), and behind them 0 if a task is due now;
--         in a limited shard also a space and in how many ms time alone lets a limit key of the call go on, if one waits
--       | an error FULL: nothing was changed, the workers keep their leases
local sub, byte, char, find = string.sub, string.byte, string.char, string.find
local counters = redis.call('HMGET', COUNTERS, 'outbox_bytes', 'largest_body', 'live', 'limited')
local limits = nil
-- include lib/limits.lua
if counters[4] and not limits then return redis.error_reply('LIMITED the shard has tasks with limit keys') end
if tonumber(counters[1] or 0) >= tonumber(ARGV[2]) then
  return redis.error_reply('FULL the outbox of the shard has all the bytes that it may have')
end

local ids, others, is_due = {}, {}, false
for i = 1, #ARGV[4] / 16 do ids[i] = sub(ARGV[4], 16 * i - 15, 16 * i) end
local runs = #ARGV[6] / 4 - #ids
local width = limits and 5 or 3
for a = 7 + runs, #ARGV - width + 1, width do others[tonumber(ARGV[a])] = a end
local records = #ids > 0 and redis.call('HMGET', RECORDS, unpack(ids)) or {}
-- Ends the lease of a limited task; made once one is met.
local lease_ended
if limits then
  local keys = {}
  for i = 1, #ids do
    if records[i] and byte(records[i]) == 107 then keys[#keys + 1] = sub(records[i], 2, 9) end
  end
  if keys[1] then
    limits().read_all(keys)
    lease_ended = limits().lease_ended
  end
end

-- Decides about an item that is not the common case: first attempt, this generation, a task that was never rejected.
-- The functions for records are made only where one is met: each costs every call that makes it.
local function make_judge()
  -- include lib/record.lua
  -- include lib/held.lua
  -- Ends a reservation whose worker has done its replica: nobody else would get the others. They have passed all
  -- elements of the task, so one replica waits in `delayed`, is due at once, and comes back in a new element.
  local function release(id, t, grant)
    t[RESERVED] = nil
    if left(t) <= 0 then return end
    if left(t) == 1 then
      redis.call('HINCRBY', COUNTERS, 'open', -1)
      redis.call('HINCRBY', COUNTERS, 'open_bytes', -redis.call('HSTRLEN', BODIES, id) - OVERHEAD)
    end
    table.insert(t[WAIT], grant)
    redis.call('ZADD', DELAYED, now, id .. grant)
    is_due = true
  end
  -- Returns the code for a token; with the record to be when it is OK, and whether that is final.
  return function(id, record, token_generation, token, attempt, hold, pace)
    record = record or fresh(id)
    if record and token_generation ~= generation then return LEASE_LOST end
    local grant, worker = string.match(token, '^h(%d+):(.*)$')
    local code, t, at = held(record, token_generation, grant, worker)
    if code ~= OK then
      local before = t and find_worker(t[CREDITED], worker)
      return before and t[CREDITED][before + 1] == grant and REPEAT or code
    end
    if tonumber(attempt) > t[FAILS] + 1 then return LEASE_LOST end
    local reports = hold and (tonumber(hold) > 0 or tonumber(pace) > 0)
    if reports and not t.limit then return NOT_LIMITED end
    remove_pair(t[HELD], at)
    table.insert(t[CREDITED], worker)
    table.insert(t[CREDITED], grant)
    local is_final = #t[CREDITED] / 2 >= t[NUM]
    if t.limit then
      limits().lease_ended(t.limit, id)
      if is_final then limits().pass(t.limit, id) end
      if reports then limits().report(t.limit, tonumber(hold), tonumber(pace)) end
    end
    if is_final then
      t[ST], t[AT], t[FAILED], t[LOG], t[RESERVED] = 'F', now, nil, nil, nil
    elseif t[RESERVED] and t[RESERVED][1] == worker then
      release(id, t, grant)
    end
    return OK, save(t), is_final
  end
end
local judge

-- The record 'm' of several after the holder at this place is credited, and whether it is final.
local function credit(record, at)
  local num, holders, credited = byte(record, 2, 4)
  local entries = sub(record, 5, at - 1) .. 'c' .. sub(record, at + 1)
  if credited + 1 == num then return char(101, num) .. now .. entries, true end
  return char(109, num, holders - 1, credited + 1) .. entries, false
end

-- Lua makes one text of texts in a sixth of the time that it takes for numbers.
local DIGITS = {'1', '2', '3', '4', '5', '6', '7'}
local is_current, completed_at = ARGV[3] == generation, 'f' .. now .. ':'
local i, codes, changed, record_args, ended_leases, finals = 0, {}, {}, {}, {}, {}
for run = 1, runs do
  local token = ARGV[6 + run]
  local grant, completed = sub(token, 2, find(token, ':', 1, true) - 1), completed_at .. sub(token, 2)
  local entry = nil
  for _ = 1, struct.unpack('>I4', ARGV[6], 4 * (#ids + run) - 3) do
    i = i + 1
    local id = ids[i]
    local record, code, after, is_final = changed[id] or records[i], 1, nil, true
    local is_common = record and is_current and not others[i]
    if is_common and record == token then
      after = completed
    elseif is_common and limits and byte(record) == 107 and sub(record, 10) == token then
      after = completed
      lease_ended(sub(record, 2, 9), id)
    else
      local at = nil
      if is_common and byte(record) == 109 then
        entry = entry or '\n' .. sub(token, #grant + 3) .. '\th' .. grant .. '\n'
        at = find(record, entry, 5, true)
      end
      if at then
        after, is_final = credit(record, at + #entry - #grant - 2)
      else
        local a = others[i]
        judge = judge or make_judge()
        code, after, is_final = judge(id, record, a and ARGV[a + 1] or ARGV[3], token, a and ARGV[a + 2] or 1,
          a and limits and ARGV[a + 3], a and limits and ARGV[a + 4])
      end
    end
    if after then
      local n = #ended_leases
      changed[id] = after
      record_args[2 * n + 1], record_args[2 * n + 2] = id, after
      ended_leases[n + 1] = id .. grant
      if is_final then finals[#finals + 1] = id end
    end
    codes[i] = DIGITS[code]
  end
end

if #ended_leases > 0 then
  redis.call('HSET', RECORDS, unpack(record_args))
  redis.call('ZREM', LEASES, unpack(ended_leases))
  local reports = ARGV[5]
  if #ended_leases < #ids then
    local credited, from = {}, 1
    for i = 1, #ids do
      local length = struct.unpack('>I4', ARGV[6], 4 * i - 3)
      if codes[i] == '1' then credited[#credited + 1] = sub(reports, from, from + length - 1) end
      from = from + length
    end
    reports = table.concat(credited)
  end
  local fields = {'outbox_bytes', (counters[1] or 0) + #reports}
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
  -- One entry for the call, and in it one value: its time is the completions' time.
  redis.call('XADD', OUTBOX, '*', 'b', reports)
end
if is_due then codes[#codes + 1] = '0' end
local next_start = limits and settle_limits()
if next_start then codes[#codes + 1] = ' ' .. string.format('%.0f', next_start) end
return table.concat(codes)
