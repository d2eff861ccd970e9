-- Offers what is due: replicas whose backoff is over in the retry lane, tasks whose time has come in their lane. Never before its time.
--
-- ARGV[2] wake channel   ARGV[3] queue   ARGV[4] at most
-- Returns {promoted, more 0|1, when the next is due (ms) or -1}
local most, promoted = tonumber(ARGV[4]), 0
local due = redis.call('ZRANGE', DELAY, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
for _, member in ipairs(due) do
  local id, first = string.sub(member, 1, 16), #member == 16
  local record = redis.call('HGET', REC, id)
  local t = record and load(record)
  redis.call('ZREM', DELAY, member)
  -- A final task may leave backoff entries behind.
  if t and t[ST] == 'L' and t[WAIT] > 0 then
    local priority = string.byte(redis.call('HGET', BODY, id) or '\2')
    if first then
      t[WAIT] = 0
      redis.call('LPUSH', T(lane_of(priority, false)), element(t[NUM], #t[CREDITED] / 2, id))
      -- Its bytes were counted when it was enqueued.
      count('open', 1)
    else
      offer(id, t, lane_of(priority, true))
      t[WAIT] = t[WAIT] - 1
    end
    redis.call('HSET', REC, id, save(t))
    promoted = promoted + 1
  end
end
if promoted > 0 then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
local next_due = redis.call('ZRANGE', DELAY, 0, 0, 'WITHSCORES')[2]
return {promoted, #due == most and 1 or 0, tonumber(next_due or -1)}
