
-- Leases that an operator or a deadline ended, for the processes whose sessions hold them: these
-- notify their workers. A message has up to this many leases, each as the id and 8 bytes of the
-- grant.
local LOST_AT_ONCE = 1000
local lost = {}
local function lose(id, grant) lost[#lost + 1] = id .. struct.pack('>I8', tonumber(grant) or 0) end
local function tell_lost(channel)
  for from = 1, #lost, LOST_AT_ONCE do
    local to = math.min(from + LOST_AT_ONCE - 1, #lost)
    redis.call('PUBLISH', channel, '?' .. table.concat(lost, '', from, to))
  end
end
