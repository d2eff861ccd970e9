
-- Leases that an operator or a deadline ended, for the processes whose sessions hold them: they tell their workers. One
-- message has so many of them, each as the id and the grant in 8 bytes.
local LOST_AT_ONCE = 1000
local lost = {}

-- A grant of up to 19 digits in 8 bytes. Lua's numbers are exact up to 2^53, so the two halves are computed apart.
local function eight_bytes(grant)
  local high, low = tonumber(string.sub(grant, 1, -10)) or 0, tonumber(string.sub(grant, -9)) or 0
  -- grant = high * 10^9 + low, and high = upper * 2^16 + lower.
  local lower = high % 65536
  local upper = (high - lower) / 65536 * 1e9
  -- grant = upper * 2^16 + rest
  local rest = lower * 1e9 + low + upper % 65536 * 65536
  return struct.pack('>I4I4', math.floor(upper / 65536) + math.floor(rest / 4294967296), rest % 4294967296)
end
local function lose(id, grant) lost[#lost + 1] = id .. eight_bytes(grant) end
local function tell_lost(channel)
  for from = 1, #lost, LOST_AT_ONCE do
    local to = math.min(from + LOST_AT_ONCE - 1, #lost)
    redis.call('PUBLISH', channel, '?' .. table.concat(lost, '', from, to))
  end
end
