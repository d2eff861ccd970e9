
-- The ends of leases and tasks.

-- The beginning of the body of a task, at least as much as scripts read.
local function head_text(id)
  return redis.call('HSTRLEN', BODIES, id) > LARGE and redis.call('HGET', BODIES, id .. 'h')
    or redis.call('HGET', BODIES, id) or ''
end

-- Returns the priority and max_attempts of a task from the beginning of its body.
local function head_in(head)
  if #head < 5 then return 2, 1 end
  return struct.unpack('>BI4', head)
end
local function head_of(id) return head_in(head_text(id)) end

-- Returns the task's own backoff from the beginning of its body: its kind (0 none, so the queue's
-- waits count, 1 constant, 2 linear, 3 exponential), the first and the longest wait (ms), the
-- jitter (percent), and the time at which the task gives up (ms, 0 never).
local function own_backoff(head)
  local from = limited_head(head)
  if string.byte(head, from + 1) ~= OWN or #head < from + OWN_BYTES then return 0, 0, 0, 0, 0 end
  return struct.unpack('>BI4I4BI8', head, from + 3)
end

-- Returns the wait after the failure number `n` of a replica, with jitter. `policy` has the waits
-- of the queue.
local function backoff(head, n, policy)
  local kind, initial, longest, percent = own_backoff(head)
  local base, jitter = policy[math.min(n, #policy)], 0.2
  if kind > 0 then
    base, jitter = initial, percent / 100
    if kind == 2 then base = initial * n elseif kind == 3 then base = initial * 2 ^ (n - 1) end
    base = math.min(base, longest)
  end
  return math.floor(base * (1 - jitter + 2 * jitter * math.random()))
end

-- Returns whether the task gives up before the next attempt, which is due in `delay` (ms). If an
-- operator sent the task again, it has no such limit.
local function gives_up(head, t, delay)
  local _, _, _, _, at = own_backoff(head)
  return at > 0 and (t[EPOCH] or 0) == 0 and now + delay > at
end

-- The record of a task, as lib/record.lua reads it; that of a limited task that has only a body names its limit key.
local function record_of(id)
  local record = redis.call('HGET', RECORDS, id)
  if record then return record end
  local head = head_text(id)
  -- Absent, or damaged from outside.
  if head == '' then return fresh(id) end
  local _, limit = limited_head(head)
  return limit and 'k' .. limit .. '1' or '1'
end

local function weight_of(id) return redis.call('HSTRLEN', BODIES, id) + OVERHEAD end

-- The events that the call reports; each begins with the field b, d or x. write_reports() puts them into as few entries
-- as fit, and never splits an event.
local ENTRY_VALUES = 6000
local events, ends, event_bytes = {}, {}, 0
local function report(...)
  if #events + select('#', ...) - (ends[#ends] or 0) > ENTRY_VALUES then ends[#ends + 1] = #events end
  for _, value in ipairs({...}) do
    events[#events + 1] = value
    event_bytes = event_bytes + #tostring(value)
  end
end
-- Reports events that the caller has encoded, in a field b. Its name does not count as bytes of the
-- outbox.
local function report_framed(frames)
  events[#events + 1], events[#events + 2] = 'b', frames
  event_bytes = event_bytes + #frames
end
local function write_reports()
  if #events > 0 then ends[#ends + 1] = #events end
  local from = 1
  for _, to in ipairs(ends) do
    redis.call('XADD', OUTBOX, '*', unpack(events, from, to))
    from = to + 1
  end
  count('outbox_bytes', event_bytes)
end

-- Drops the body of a task without a record that can be read. Only a task that is not final has a body, so it counted
-- as live.
local function drop_body(id)
  if redis.call('HDEL', BODIES, id, id .. 'h') > 0 then count('live', -1) end
end

-- Frees the place that a task whose record cannot be read has behind its limit key. The body names the key, or what is
-- left of the record.
local function forget_limit(id, record)
  local _, limit = limited_head(head_text(id))
  if not limit and record and string.byte(record) == 107 then limit = string.sub(record, 2, 9) end
  if limit and #limit == 8 then limits().forget(limit, id) end
end

-- Drops a task whose record cannot be read: damage from outside. It then counts as missing, and the
-- reconciler brings it back from SQL. It is unknown whether it counted as open.
local function drop_damaged(id, record)
  forget_limit(id, record)
  redis.call('HDEL', RECORDS, id)
  drop_body(id)
end

-- Ends the task `id` with the record `t`: closes its leases and backoffs, forgets its body, and keeps the record until
-- SQL has the end.
local function finish(id, t, status)
  if left(t) > 0 then
    count('open', -1)
    count('open_bytes', -weight_of(id))
  end
  for i = 2, #t[HELD], 2 do
    redis.call('ZREM', LEASES, id .. t[HELD][i])
    if t.limit then limits().lease_ended(t.limit, id) end
  end
  if t.limit then limits().pass(t.limit, id) end
  for _, grant in ipairs(t[WAIT]) do redis.call('ZREM', DELAYED, id .. grant) end
  t[ST], t[WAIT], t[HELD], t[AT], t[FAILED], t[LOG], t[RESERVED] = status, {}, {}, now, nil, nil, nil
  redis.call('HDEL', BODIES, id, id .. 'h')
  redis.call('RPUSH', FINALS, id)
  count('live', -1)
end

-- Puts the newest offer of the task at the head of the lane or, if the task has a limit key, first
-- among the tasks that wait behind the key.
local function put_offer(id, t, lane)
  if t.limit then
    limits().enter(t.limit, id, t[OFFER], math.ceil(lane / 2), true)
  else
    redis.call('LPUSH', T(lane), element(t[NUM], t[OFFER], id))
  end
end

-- Offers one more replica of the task in a new element, which no worker has passed. All workers may
-- have passed its older elements, which no longer count. `t` must not count the replica as left
-- yet: the caller changes that afterwards.
local function offer(id, t, lane)
  if left(t) <= 0 then
    count('open', 1)
    count('open_bytes', weight_of(id))
  end
  t[OFFER] = (t[OFFER] or 0) + 1
  put_offer(id, t, lane)
end

-- Returns how many of the failures count. If a task has several replicas, a worker can use up the
-- attempts of one of them at most.
local function blame(t, worker, failures, max_attempts)
  if t[NUM] == 1 then return failures end
  t[OFFER], t[FAILED] = t[OFFER] or 0, t[FAILED] or {}
  local at = find_worker(t[FAILED], worker)
  if not at then
    at = #t[FAILED] + 1
    t[FAILED][at], t[FAILED][at + 1] = worker, 0
  end
  local before = t[FAILED][at + 1]
  if before == REFUSED then return 0 end
  local after = math.min(before + failures, max_attempts)
  t[FAILED][at + 1] = after == max_attempts and REFUSED or after
  return after - before
end

-- Records a failure. The last ones become a part of the dead letter.
local LOG_ENTRIES, LOG_REASON = 10, 256
local function log_failure(t, worker, reason)
  t[OFFER], t[FAILED], t[LOG] = t[OFFER] or 0, t[FAILED] or {}, t[LOG] or {}
  local log = t[LOG]
  log[#log + 1], log[#log + 2], log[#log + 3] = now, worker, string.sub(reason, 1, LOG_REASON)
  while #log > 3 * LOG_ENTRIES do table.remove(log, 1) end
end

-- Ends the lease at `i` of t[HELD] with `cost` failures (-1: max_attempts). The replica waits for the backoff of this
-- failure, its task's own or the queue's, or for `delay` (ms) when given. `policy` = {backoff (ms), …} of the queue.
-- Returns 'dead', or when the replica is due (ms).
local function reject(id, t, i, cost, delay, policy, reason)
  local worker, grant = t[HELD][i], t[HELD][i + 1]
  redis.call('ZREM', LEASES, id .. grant)
  if t.limit then limits().lease_ended(t.limit, id) end
  local head = head_text(id)
  local priority, max_attempts = head_in(head)
  if cost ~= 0 then
    t[FAILS] = t[FAILS] + blame(t, worker, cost < 0 and max_attempts or cost, max_attempts)
    log_failure(t, worker, reason)
  end
  local is_dead = cost ~= 0 and t[FAILS] >= max_attempts * t[NUM]
  if not is_dead then
    delay = delay or backoff(head, math.max(math.ceil(t[FAILS] / t[NUM]), 1), policy)
    if cost ~= 0 and gives_up(head, t, delay) then
      is_dead, reason = true, reason .. ' (the next attempt would begin after give_up_after)'
    end
  end
  if is_dead then
    local log = cmsgpack.pack(t[LOG])
    remove_pair(t[HELD], i)
    -- Put the replica back as one that waits, so that finish() does not count it as left.
    table.insert(t[WAIT], grant)
    finish(id, t, 'D')
    if t[EPOCH] then
      report('d', id, 'a', t[FAILS], 'r', reason, 'w', worker, 'h', log, 'e', t[EPOCH])
    else
      report('d', id, 'a', t[FAILS], 'r', reason, 'w', worker, 'h', log)
    end
    return 'dead'
  end
  -- End a reservation for a worker that may not have the task again, because no other worker would
  -- get it.
  if t[RESERVED] and t[RESERVED][1] == worker and is_refused(t, worker) then t[RESERVED] = nil end
  if delay <= 0 then
    offer(id, t, lane_of(priority, true))
    remove_pair(t[HELD], i)
    return now
  end
  remove_pair(t[HELD], i)
  table.insert(t[WAIT], grant)
  redis.call('ZADD', DELAYED, now + delay, id .. grant)
  if delay > tonumber(redis.call('HGET', COUNTERS, 'longest_delay') or 0) then
    redis.call('HSET', COUNTERS, 'longest_delay', delay)
  end
  return now + delay
end

-- Moves deadlines that lie farther from now than any that a script wrote, because the clock was set
-- back. They become the longest possible from now.
local function clamp(zset, longest, most)
  local limit = now + longest
  local last = redis.call('ZRANGE', zset, -1, -1, 'WITHSCORES')
  if not last[2] or tonumber(last[2]) <= limit then return end
  local beyond = redis.call('ZRANGE', zset, string.format('(%.0f', limit), '+inf', 'BYSCORE', 'LIMIT', 0, most)
  for _, member in ipairs(beyond) do redis.call('ZADD', zset, limit, member) end
end
