-- For scripts that end leases or tasks.

-- The task `id` with the record `t` is over: closes its leases, forgets its body, keeps the record until SQL has it.
local function finish(id, t, status)
  if left(t) > 0 then
    count('open', -1)
    count('bytes', -redis.call('HSTRLEN', BODY, id))
  end
  for i = 2, #t[HELD], 2 do redis.call('ZREM', LEASE, id .. t[HELD][i]) end
  t[ST], t[WAIT], t[HELD], t[AT] = status, 0, {}, now
  redis.call('HDEL', BODY, id)
  redis.call('RPUSH', FINAL, id)
  count('live', -1)
end

-- Offers one more replica of the task in a new element, which nobody has passed: its older elements may stand where every worker has
-- been. `t` is the record before; the caller makes room in it afterwards.
local function offer(id, t, lane)
  if left(t) <= 0 then
    count('open', 1)
    count('bytes', redis.call('HSTRLEN', BODY, id))
  end
  redis.call('LPUSH', T(lane), element(t[NUM], t[NUM] - 1, id))
end

-- The holder at `i` of t[HELD] gives its replica back after `cost` failures. `policy` = {backoff in ms, …}; the wait is the one for this
-- failure, jittered by up to a fifth, or `delay` (ms) when given. Answers 'dead', or when the replica is due (ms).
local function give_back(id, t, i, cost, delay, policy, reason)
  local worker, grant = t[HELD][i], t[HELD][i + 1]
  redis.call('ZREM', LEASE, id .. grant)
  local priority, max_attempts = 2, 1
  local head = redis.call('HGET', BODY, id)
  if head then priority, max_attempts = struct.unpack('>BI4', head) end
  if cost < 0 then cost = max_attempts end
  t[FAILS] = t[FAILS] + cost
  if t[FAILS] >= max_attempts * t[NUM] then
    remove_pair(t[HELD], i)
    -- What finish() subtracts for an open task must not count the replica that was just given back.
    t[WAIT] = t[WAIT] + 1
    finish(id, t, 'D')
    redis.call('XADD', OUT, '*', 'd', id, 'a', t[FAILS], 'r', reason, 'w', worker)
    return 'dead'
  end
  if not delay then
    local base = policy[math.min(math.max(math.ceil(t[FAILS] / t[NUM]), 1), #policy)]
    delay = math.floor(base * (0.8 + 0.4 * math.random()))
  end
  if delay <= 0 then
    offer(id, t, lane_of(priority, true))
    remove_pair(t[HELD], i)
    return now
  end
  remove_pair(t[HELD], i)
  t[WAIT] = t[WAIT] + 1
  redis.call('ZADD', DELAY, now + delay, id .. grant)
  return now + delay
end
