
-- The lanes: the last 18 keys of a script, T, C and P of each lane. README.md describes them.
local LAST = #KEYS
local function T(lane) return KEYS[LAST - 20 + 3 * lane] end
local function C(lane) return KEYS[LAST - 19 + 3 * lane] end
local function P(lane) return KEYS[LAST - 18 + 3 * lane] end

-- Returns the lane (1 to 6) of a priority (1 high, 2 medium, 3 low). Each priority has a retry
-- lane, which comes before its other lane. A task with an invalid priority, because its body is
-- damaged, waits in a medium lane: its number would lead to a key that is no lane, such as the
-- outbox.
local function is_priority(priority) return priority >= 1 and priority <= 3 end
local function lane_of(priority, retry)
  if not is_priority(priority) then priority = 2 end
  return priority * 2 - (retry and 1 or 0)
end
