
-- A shared session. Its session book is in Redis and not in a process, so any process can serve it.
-- All its keys are in one slot.
--
-- KEYS[1] -> <p>:{sessions:<n>}:of:<worker>      hash: session -> its entry; `p` and a process -> how many tasks the
--                                                process's streams of this worker may have in hand and on demand
-- KEYS[2] -> <p>:{sessions:<n>}:due              zset: session and worker -> when it ends unless a call comes (ms)
-- KEYS[3] -> <p>:{sessions:<n>}:processes        zset: process with streams -> until when it lives (ms)
-- KEYS[4] -> <p>:{sessions:<n>}:held:<session>   hash: task in hand -> started (0|1|2) and lease token
-- KEYS[5] -> <p>:{sessions:<n>}:ends:<session>   zset: task in hand -> the deadline that the session knows (ms)
-- ARGV[2] worker   ARGV[3] session
--
-- An entry is msgpack [time-out (ms), demand, tasks in hand, 1 while the session ends, the worker's plan (opaque), how
-- often its demand was set to 0, the latest deadline of the leases in hand (ms)].
local SESSIONS, DUE, PROCESSES, HELD, ENDS = unpack(KEYS)
local worker, session = ARGV[2], ARGV[3]
local TIMEOUT, DEMAND, IN_HAND, ENDING, PLAN, SURRENDERS, LATEST = 1, 2, 3, 4, 5, 6, 7
local member = session .. worker

-- Returns the session, or nil if there is none or it is ending.
local function alive()
  local packed = redis.call('HGET', SESSIONS, session)
  local s = packed and cmsgpack.unpack(packed)
  if s and s[ENDING] == 0 then return s end
end

-- Drops the leases that are over, and counts what is in hand.
local function recount(s)
  repeat
    local over = redis.call('ZRANGEBYSCORE', ENDS, '-inf', now, 'LIMIT', 0, 1000)
    if #over > 0 then
      redis.call('HDEL', HELD, unpack(over))
      redis.call('ZREM', ENDS, unpack(over))
    end
  until #over < 1000
  s[IN_HAND] = redis.call('ZCARD', ENDS)
  s[LATEST] = tonumber(redis.call('ZRANGE', ENDS, -1, -1, 'WITHSCORES')[2] or 0)
end

-- Sets the demand to 0. Calls that wanted tasks before are void.
local function surrender(s)
  s[DEMAND], s[SURRENDERS] = 0, s[SURRENDERS] + 1
end

-- Each call of the worker is a sign of life.
local function write(s)
  redis.call('HSET', SESSIONS, session, cmsgpack.pack(s))
  redis.call('ZADD', DUE, now + s[TIMEOUT], member)
end
