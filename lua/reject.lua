-- Workers give tasks back, or taskd takes back a lease that it could not deliver.
--
-- ARGV[2] seed of the jitter   ARGV[3] wake channel   ARGV[4] queue   ARGV[5] backoff as msgpack array of ms
-- then per item 7 values: id, generation, grant, worker, mode, delay (ms, '' = the backoff), reason
--   mode: 'retry' counts one failure | 'never' counts max_attempts | 'release' (not delivered) counts none and offers the task at once
-- Returns per item {code, dead 0|1}: 1 OK | 3 LEASE_LOST | 4 ALREADY_COMPLETED | 5 UNKNOWN_TASK | 6 CANCELLED
math.randomseed(tonumber(ARGV[2]))
local policy = cmsgpack.unpack(ARGV[5])
local answers, offered = {}, false
for a = 6, #ARGV, 7 do
  local id, life, grant, worker, mode = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
  local record = redis.call('HGET', REC, id)
  local t = record and load(record)
  local answer
  if not record then
    answer = {5, 0}
  elseif not t then
    drop_damaged(id)
    answer = {3, 0}
  else
    local held = find_grant(t[HELD], grant)
    if t[ST] == 'X' then
      answer = {6, 0}
    elseif t[ST] == 'F' or find_worker(t[CREDITED], worker) then
      answer = {4, 0}
    elseif life ~= generation or not held or t[HELD][held] ~= worker then
      answer = {3, 0}
    else
      local cost, delay = 1, tonumber(ARGV[a + 5])
      if mode == 'never' then cost = -1 end
      if mode == 'release' then
        cost, delay = 0, 0
        redis.call('ZREM', UNSEEN, grant)
      end
      local outcome = give_back(id, t, held, cost, delay, policy, ARGV[a + 6])
      redis.call('HSET', REC, id, save(t))
      offered = offered or outcome == now
      answer = {1, outcome == 'dead' and 1 or 0}
    end
  end
  answers[#answers + 1] = answer
end
write_reports()
if offered then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
return answers
