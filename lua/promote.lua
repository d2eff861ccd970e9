-- Offers what is due: replicas whose backoff is over go to the retry lane, tasks whose time has come to their lane.
--
-- ARGV[2] wake channel   ARGV[3] the wake: queue, and perhaps a process   ARGV[4] at most
-- ARGV[5] horizon (ms): no task comes to the shard longer than that before its time
-- Returns {promoted, more 0|1, when the next is due (ms) or -1}
local most, promoted = tonumber(ARGV[4]), 0
local longest = math.max(tonumber(ARGV[5]), tonumber(redis.call('HGET', COUNTERS, 'longest_delay') or 0))
clamp(DELAYED, longest, most)

-- Where the record says that this grant waits.
local function waits_at(t, grant)
  for i, waiting in ipairs(t[WAIT]) do
    if waiting == grant then return i end
  end
end

local due = redis.call('ZRANGE', DELAYED, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
for _, member in ipairs(due) do
  local id, grant = string.sub(member, 1, 16), string.sub(member, 17)
  local record = redis.call('HGET', RECORDS, id)
  local t = record and load(record)
  local at = t and t[ST] == 'L' and waits_at(t, grant)
  redis.call('ZREM', DELAYED, member)
  -- A delay proves that the task had a record.
  if not t then drop_damaged(id) end
  if at then
    local priority = head_of(id)
    if grant == '' then
      t[WAIT] = {}
      redis.call('LPUSH', T(lane_of(priority, false)), element(t[NUM], t[OFFER] or 0, id))
      count('open', 1)
      count('open_bytes', weight_of(id))
    else
      offer(id, t, lane_of(priority, true))
      table.remove(t[WAIT], at)
    end
    redis.call('HSET', RECORDS, id, save(t))
    promoted = promoted + 1
  end
end
if promoted > 0 then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
local next_due = redis.call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2]
return {promoted, #due == most and 1 or 0, tonumber(next_due or -1)}
