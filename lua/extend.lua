-- Makes leases run until `by` from now. The token stays the same. Whoever extends a lease has received it.
--
-- ARGV[2…] per item 5 values: id, generation, grant, worker, by (ms)
-- Returns per item {code, deadline (ms)}: 1 OK | 3 LEASE_LOST | 4 ALREADY_COMPLETED | 5 UNKNOWN_TASK | 6 CANCELLED
local answers, longest = {}, 0
for a = 2, #ARGV, 5 do
  local id, life, grant, worker, by = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], tonumber(ARGV[a + 4])
  local record = redis.call('HGET', REC, id)
  local t = record and load(record)
  local answer
  if not record then
    answer = {5, 0}
  elseif not t then
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
      redis.call('ZADD', LEASE, now + by, id .. grant)
      redis.call('ZREM', UNSEEN, grant)
      longest = math.max(longest, by)
      answer = {1, now + by}
    end
  end
  answers[#answers + 1] = answer
end
if longest > tonumber(redis.call('HGET', META, 'lease') or 0) then redis.call('HSET', META, 'lease', longest) end
return answers
