-- Ends leases that ran out: each is a failure, decided in this step (backoff or dead). The notices in the outbox only report.
-- While the outbox is full it does nothing: workers cannot report then, and a broker that is down must not turn every task dead.
--
-- ARGV[2] seed of the jitter   ARGV[3] wake channel   ARGV[4] queue   ARGV[5] backoff as msgpack array of ms
-- ARGV[6] leases at most   ARGV[7] outbox entries at which expiries pause
-- Returns {expired, dead, more 0|1, the next deadline (ms) or -1}
math.randomseed(tonumber(ARGV[2]))
if redis.call('XLEN', OUT) >= tonumber(ARGV[7]) then return {0, 0, 0, -1} end
local policy, most = cmsgpack.unpack(ARGV[5]), tonumber(ARGV[6])
local expired, dead, offered = 0, 0, false
local due = redis.call('ZRANGE', LEASE, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
-- Refused when memory is full, as completions are: else tasks that are done and cannot be reported would be given up.
if #due > 0 then redis.call('HINCRBY', META, 'open', 0) end
for _, lease in ipairs(due) do
  local id, grant = string.sub(lease, 1, 16), string.sub(lease, 17)
  local record = redis.call('HGET', REC, id)
  local t = record and load(record)
  local held = t and find_grant(t[HELD], grant)
  if held then
    local worker = t[HELD][held]
    local outcome = give_back(id, t, held, 1, nil, policy, 'lease expired')
    redis.call('HSET', REC, id, save(t))
    redis.call('XADD', OUT, '*', 'x', id, 'w', worker, 'a', t[FAILS], 'e', outcome == 'dead' and '1' or '0')
    expired = expired + 1
    if outcome == 'dead' then dead = dead + 1 end
    offered = offered or outcome == now
  else
    redis.call('ZREM', LEASE, lease)
  end
end
if offered then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
local next_deadline = redis.call('ZRANGE', LEASE, 0, 0, 'WITHSCORES')[2]
return {expired, dead, #due == most and 1 or 0, tonumber(next_deadline or -1)}
