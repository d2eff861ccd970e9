-- Says which priorities have elements, so that a caller with several shards takes the most urgent first. Changes
-- nothing.
--
-- Returns a sum of 1 (high), 2 (medium), 4 (low)
local sum = 0
for priority = 1, 3 do
  local there = redis.call('EXISTS', T(lane_of(priority, true)), T(lane_of(priority, false)))
  if there > 0 then sum = sum + 2 ^ (priority - 1) end
end
return sum
