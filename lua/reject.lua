-- Ends leases without a result: a worker rejects its task, or taskd releases a lease that it could not deliver.
--
-- ARGV[2] seed of the jitter   ARGV[3] wake channel   ARGV[4] queue   ARGV[5] backoff as msgpack array of ms
-- then per item 7 values: id, generation, grant, worker, mode, delay (ms, '' = the backoff), reason
--   mode: 'retry' counts one failure | 'never' counts max_attempts | 'release' (not delivered) counts none and offers
--   the task at once
-- Returns per item {code, dead 0|1}; lib/held.lua names the codes
math.randomseed(tonumber(ARGV[2]))
local policy = cmsgpack.unpack(ARGV[5])
local answers, offered = {}, false
for a = 6, #ARGV, 7 do
  local id, grant, mode, dead = ARGV[a], ARGV[a + 2], ARGV[a + 4], 0
  local record = redis.call('HGET', RECORDS, id)
  local code, t, at = held(record, ARGV[a + 1], grant, ARGV[a + 3])
  if code == OK then
    local cost, delay = 1, tonumber(ARGV[a + 5])
    if mode == 'never' then cost = -1 end
    if mode == 'release' then
      cost, delay = 0, 0
      redis.call('ZREM', UNDELIVERED, grant)
    end
    local outcome = reject(id, t, at, cost, delay, policy, ARGV[a + 6])
    redis.call('HSET', RECORDS, id, save(t))
    offered = offered or outcome == now
    dead = outcome == 'dead' and 1 or 0
  elseif record and not t then
    drop_damaged(id)
  end
  answers[#answers + 1] = {code, dead}
end
write_reports()
if offered then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
return answers
