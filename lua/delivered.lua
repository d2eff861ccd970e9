-- Marks grants as delivered to their workers: a lease that expires from now on is a failure. Claims
-- carry such grants along; this script is for when no claim comes.
--
-- ARGV[2…] grants
-- Returns how many of them were undelivered
local known = 0
for from = 2, #ARGV, 6000 do
  known = known + redis.call('ZREM', UNDELIVERED, unpack(ARGV, from, math.min(from + 5999, #ARGV)))
end
return known
