-- Records tasks that are being delivered to a shared session, and subtracts them from its demand:
-- all of them, or none.
--
-- ARGV[4…] per task 3 values: id, started and lease token, deadline (ms)
-- Returns {1 recorded | 0 there is no such session | 2 it wants fewer, demand, tasks in hand}
local s = alive()
if not s then return {0, 0, 0} end
local count, code = (#ARGV - 3) / 3, 2
if count <= s[DEMAND] then
  code, s[DEMAND] = 1, s[DEMAND] - count
  for a = 4, #ARGV, 3 do
    redis.call('HSET', HELD, ARGV[a], ARGV[a + 1])
    redis.call('ZADD', ENDS, ARGV[a + 2], ARGV[a])
  end
end
recount(s)
write(s)
return {code, s[DEMAND], s[IN_HAND]}
