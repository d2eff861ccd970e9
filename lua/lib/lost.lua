
-- Leases that an operator or a deadline ended, for the processes whose sessions hold them: they tell their workers. One
-- message has so many of them, each as the id and the grant in 8 bytes.
local LOST_AT_ONCE = 1000
local lost = {}
local function lose(id, grant) lost[#lost + 1] = id .. struct.pack('>I8', tonumber(grant) or 0) end
local function tell_lost(channel)
  for from = 1, #lost, LOST_AT_ONCE do
    local to = math.min(from + LOST_AT_ONCE - 1, #lost)
    redis.call('PUBLISH', channel, '?' .. table.concat(lost, '', from, to))
  end
end
