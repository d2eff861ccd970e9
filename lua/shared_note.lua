-- Records in the session book of a shared session which of its leases ended or were extended.
--
-- ARGV[4] how many leases ended
-- then per ended lease 3 values: id, lease token, 1 if a report ended it
-- then per extended lease 4 values: id, lease token, deadline (ms), and what to record as started
--   (0|1|2) if the session did not have the lease
-- Returns {how many tasks in hand the reports ended, demand, tasks in hand}, or {} if there is no such session
local s = alive()
if not s then return {} end
local counted, behind = 0, 5 + 3 * tonumber(ARGV[4])
for a = 5, behind - 1, 3 do
  local value = redis.call('HGET', HELD, ARGV[a])
  -- The session may have another lease of this task by now.
  if value and string.sub(value, 2) == ARGV[a + 1] then
    redis.call('HDEL', HELD, ARGV[a])
    redis.call('ZREM', ENDS, ARGV[a])
    counted = counted + tonumber(ARGV[a + 2])
  end
end
for a = behind, #ARGV, 4 do
  local value, token = redis.call('HGET', HELD, ARGV[a]), ARGV[a + 1]
  if not value or string.sub(value, 2) ~= token then
    redis.call('HSET', HELD, ARGV[a], ARGV[a + 3] .. token)
  end
  redis.call('ZADD', ENDS, ARGV[a + 2], ARGV[a])
end
recount(s)
write(s)
return {counted, s[DEMAND], s[IN_HAND]}
