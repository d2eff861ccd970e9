-- Ends the leases of a session that ended, so that other workers get the tasks at once. Ends only
-- leases with the deadline that the session knows: a lease with another one was extended elsewhere
-- meanwhile, and its worker goes on with it there. A lower deadline that no extension wrote was
-- moved after the clock stepped back, so its lease is ended, too.
--
-- ARGV[2] seed of the jitter   ARGV[3] wake channel   ARGV[4] queue   ARGV[5] backoff as msgpack array of ms
-- ARGV[6] outbox bytes at which failed attempts are not reported: a report must not fill Redis   ARGV[7] reason
-- then per item 7 values: id, generation, grant, worker, deadline (ms), started (0|1|2), failed attempt
--   started: 0 no: this is no failure, and the task is offered again at once
--     | 1 unknown: as 0 if its grant is undelivered, else one failure
--     | 2 yes, as the worker said: one failure
--   An undelivered grant stays so, because another call may end more of its leases. `expire` clears
--   it.
--   failed attempt: for the task's history, as the record of the bus has it (opaque), '' none
-- Returns per item {code, outcome}; lib/held.lua names the codes, and a lease that was extended
--   elsewhere has LEASE_LOST
--   outcome: 0 it was over, or stays | 1 offered again at no cost | 2 failed | 3 failed, and the task is dead
math.randomseed(tonumber(ARGV[2]))
local policy, reason = cmsgpack.unpack(ARGV[5]), ARGV[7]
local answers, offered, failed = {}, false, {}
for a = 8, #ARGV, 7 do
  local id, grant, outcome = ARGV[a], ARGV[a + 2], 0
  local record = record_of(id)
  local code, t, at = held(record, ARGV[a + 1], grant, ARGV[a + 3])
  local deadline = code == OK and tonumber(redis.call('ZSCORE', LEASES, id .. grant) or 0)
  if code == OK and was_extended(deadline, tonumber(ARGV[a + 4])) then
    code = LEASE_LOST
  elseif code == OK then
    local cost, delay = 1, nil
    local is_undelivered = redis.call('ZSCORE', UNDELIVERED, grant)
    local started = ARGV[a + 5]
    if started == '0' or started == '1' and is_undelivered then cost, delay = 0, 0 end
    local due = reject(id, t, at, cost, delay, policy, reason)
    redis.call('HSET', RECORDS, id, save(t))
    offered = offered or due == now
    outcome = cost == 0 and 1 or due == 'dead' and 3 or 2
    if cost == 1 and ARGV[a + 6] ~= '' then failed[#failed + 1] = ARGV[a + 6] end
  elseif record and not t then
    drop_damaged(id, record)
  end
  answers[#answers + 1] = {code, outcome}
end
if #failed > 0 and tonumber(redis.call('HGET', COUNTERS, 'outbox_bytes') or 0) < tonumber(ARGV[6]) then
  report_framed(table.concat(failed))
end
write_reports()
settle_limits()
if offered then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
return answers
