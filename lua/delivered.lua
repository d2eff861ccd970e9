-- Workers have these grants: if their leases run out from now on, it is a failure. Claims say so in passing; this is for when none comes.
--
-- ARGV[2…] grants
-- Returns how many were not known to be delivered
local known = 0
for from = 2, #ARGV, 6000 do
  known = known + redis.call('ZREM', UNSEEN, unpack(ARGV, from, math.min(from + 5999, #ARGV)))
end
return known
