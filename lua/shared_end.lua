-- Begins to end a shared session, or resumes an end whose process died. From then on, no call finds
-- the session. The caller ends its leases in their shards, and then removes it by `shared_forget`.
--
-- ARGV[4] 0 now | 1 only if it is due | 2 not yet: if it is due, it gets its time-out once more
-- ARGV[5] when another process may go on with the end (ms from now)
-- Returns {1 it ends now | 0 there is none, or it is not due, id, started and token, deadline, …}
local packed = redis.call('HGET', SESSIONS, session)
if not packed then
  redis.call('ZREM', DUE, member)
  redis.call('DEL', HELD, ENDS)
  return {0}
end
local due = redis.call('ZSCORE', DUE, member)
if ARGV[4] ~= '0' and due and tonumber(due) > now then return {0} end
local s = cmsgpack.unpack(packed)
if ARGV[4] == '2' then
  if s[ENDING] == 0 then redis.call('ZADD', DUE, now + s[TIMEOUT], member) end
  return {0}
end
s[ENDING], s[DEMAND] = 1, 0
-- Drop the leases that are over. A shard that refuses calls does not end them, and the session must
-- not wait for it.
recount(s)
redis.call('HSET', SESSIONS, session, cmsgpack.pack(s))
redis.call('ZADD', DUE, now + tonumber(ARGV[5]), member)
local answer, held = {1}, redis.call('HGETALL', HELD)
for i = 1, #held, 2 do
  answer[#answer + 1] = held[i]
  answer[#answer + 1] = held[i + 1]
  answer[#answer + 1] = redis.call('ZSCORE', ENDS, held[i]) or '0'
end
return answer
