-- Offers what is due: moves replicas whose backoff is over to the retry lane, and tasks whose time
-- has come to their lane. In a shard with limited tasks, also releases tasks of limit keys whose
-- time has come.
--
-- ARGV[2] wake channel   ARGV[3] the wake: queue, and perhaps a process   ARGV[4] at most
-- ARGV[5] horizon (ms): no task comes to the shard longer than that before its time
-- ARGV[6] limits of the queue (lib/limits.lua), '' or absent: those that the shard has
-- Returns {promoted, more 0|1, when the next is due (ms) or -1}, and in a shard with limited tasks also now (ms)
local most, promoted = tonumber(ARGV[4]), 0
local counters = redis.call('HMGET', COUNTERS, 'longest_delay', 'limited')
local longest = math.max(tonumber(ARGV[5]), tonumber(counters[1] or 0))
clamp(DELAYED, longest, most)

-- Returns the index of a grant in the list of waiting grants, or nil.
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
  -- A task with a delay had a record, so a missing one was lost.
  if not t then drop_damaged(id, record) end
  if at then
    local priority = head_of(id)
    if grant == '' then
      t[WAIT] = {}
      if t.limit then
        limits().enter(t.limit, id, t[OFFER] or 0, priority, false)
      else
        redis.call('LPUSH', T(lane_of(priority, false)), element(t[NUM], t[OFFER] or 0, id))
      end
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
local due_keys, next_start, is_walking = 0, nil, false
if counters[2] then
  local is_new, cursor = limits().set_queue(ARGV[6] or ''), redis.call('HGET', COUNTERS, 'limits_walk')
  is_walking = is_new or cursor
  local keys = redis.call('ZRANGE', STARTS, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
  -- Times farther away than any that a script wrote: the clock was set back. Let these keys check
  -- their times again.
  local beyond = string.format('(%.0f', now + tonumber(redis.call('HGET', COUNTERS, 'longest_start') or 0))
  for _, limit in ipairs(redis.call('ZRANGE', STARTS, beyond, '+inf', 'BYSCORE', 'LIMIT', 0, most)) do
    keys[#keys + 1] = limit
  end
  limits().read_all(keys)
  for _, limit in ipairs(keys) do limits().touch(limit) end
  due_keys = #keys
  if due_keys > 0 then redis.call('ZREM', STARTS, unpack(keys)) end
  -- New limits of the queue may let any key go on, so all of them look at their times, a page in each call.
  local page = cursor and not is_new and redis.call('HSCAN', LIMITS, cursor, 'COUNT', most)
  -- An operator's hold of all keys ends those of workers.
  local check = page and redis.call('HEXISTS', COUNTERS, 'limits_unhold') == 1 and limits().unhold or limits().touch
  local of_page = {}
  for i = 1, page and #page[2] or 0, 2 do
    if #page[2][i] == 8 then of_page[#of_page + 1] = page[2][i] end
  end
  limits().read_all(of_page)
  for _, limit in ipairs(of_page) do check(limit) end
  settle_limits()
  if page and page[1] == '0' then
    redis.call('HDEL', COUNTERS, 'limits_walk', 'limits_unhold')
    is_walking = false
  elseif page then
    redis.call('HSET', COUNTERS, 'limits_walk', page[1])
  end
  next_start = redis.call('ZRANGE', STARTS, 0, 0, 'WITHSCORES')[2]
end
if promoted > 0 then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
local next_due = redis.call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2]
if next_start and (not next_due or tonumber(next_start) < tonumber(next_due)) then next_due = next_start end
local more = (#due == most or due_keys == most or is_walking) and 1 or 0
return {promoted, more, tonumber(next_due or -1), counters[2] and now or nil}
