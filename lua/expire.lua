-- Ends leases that ran out. Each is a failure, and this step decides between a backoff and death.
-- The entries in the outbox only report it. If the grant of a lease never reached its worker, that
-- is no failure, and the replica is offered again at once. While the outbox is full, the script
-- does nothing: workers cannot report then, and a broker that is down must not kill every task.
--
-- ARGV[2] seed of the jitter   ARGV[3] wake channel   ARGV[4] queue   ARGV[5] backoff as msgpack array of ms
-- ARGV[6] leases at most   ARGV[7] outbox entries, ARGV[8] outbox bytes at which expiries pause
-- Returns {expired, dead, undelivered, more 0|1, the next deadline (ms) or -1}
math.randomseed(tonumber(ARGV[2]))
local counters = redis.call('HMGET', COUNTERS, 'outbox_bytes', 'longest_lease')
if redis.call('XLEN', OUTBOX) >= tonumber(ARGV[7]) or tonumber(counters[1] or 0) >= tonumber(ARGV[8]) then
  return {0, 0, 0, 0, -1}
end
local policy, most = cmsgpack.unpack(ARGV[5]), tonumber(ARGV[6])
if counters[2] then
  clamp(LEASES, tonumber(counters[2]), most)
  clamp(UNDELIVERED, tonumber(counters[2]), most)
end
local expired, dead, undelivered, offered = 0, 0, 0, false
local due = redis.call('ZRANGE', LEASES, '-inf', now, 'BYSCORE', 'LIMIT', 0, most, 'WITHSCORES')
for i = 1, #due, 2 do
  local lease, deadline = due[i], tonumber(due[i + 1])
  local id, grant = string.sub(lease, 1, 16), string.sub(lease, 17)
  local record = redis.call('HGET', RECORDS, id)
  local t = record and load(record)
  local at = t and find_grant(t[HELD], grant)
  if at then
    local worker, outcome = t[HELD][at], nil
    if redis.call('ZSCORE', UNDELIVERED, grant) then
      outcome = reject(id, t, at, 0, 0, policy, '')
      undelivered = undelivered + 1
    else
      local from = began(id, deadline)
      outcome = reject(id, t, at, 1, nil, policy, 'lease expired')
      local is_dead = outcome == 'dead' and '1' or '0'
      if from then
        report('x', id, 'w', worker, 'a', t[FAILS], 'e', is_dead, 'n', generation, 'g', grant,
          's', string.format('%.0f', from))
      else
        report('x', id, 'w', worker, 'a', t[FAILS], 'e', is_dead, 'n', generation, 'g', grant)
      end
      expired = expired + 1
    end
    redis.call('HSET', RECORDS, id, save(t))
    if outcome == 'dead' then dead = dead + 1 end
    offered = offered or outcome == now
  else
    -- A leased task had a record, so a missing one was lost. Its body must go, too: alone, it would
    -- look like a task to which nothing has happened, but no lane has it.
    if not t then drop_damaged(id, record) end
    redis.call('ZREM', LEASES, lease)
  end
end
write_reports()
settle_limits()
-- Grants whose last deadline is over have no leases left.
if #due < 2 * most then redis.call('ZREMRANGEBYSCORE', UNDELIVERED, '-inf', now) end
if offered then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
local next_deadline = redis.call('ZRANGE', LEASES, 0, 0, 'WITHSCORES')[2]
return {expired, dead, undelivered, #due == 2 * most and 1 or 0, math.ceil(tonumber(next_deadline or -1))}
