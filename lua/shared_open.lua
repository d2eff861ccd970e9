-- Opens a shared session, or resumes one. Its demand starts at 0 again.
--
-- ARGV[4] 1 open a new one, 0 resume one   ARGV[5] time-out (ms)   ARGV[6] plan
-- ARGV[7] the most shared sessions of all workers in this slot   ARGV[8] the most of this worker
-- ARGV[9…] ids of the tasks that the worker has in hand
-- Returns {code, {id, started and token, deadline, …}}
--   code: 1 it is open | 0 there is none to resume | 2 the slot has too many
--     | 3 the worker has too many
--   The tasks are those that the session has in hand and the worker does not name. They stay in
--   hand until they are reported.
local s
if ARGV[4] == '1' then
  if redis.call('ZCARD', DUE) >= tonumber(ARGV[7]) then return {2, {}} end
  -- Each call that wants tasks reads all sessions of the worker, so their number has a bound. HLEN
  -- also counts the allotments, which are few.
  if redis.call('HLEN', SESSIONS) >= tonumber(ARGV[8]) then return {3, {}} end
  s = {0, 0, 0, 0, '', 0, 0}
else
  s = alive()
  if not s then return {0, {}} end
  surrender(s)
end
s[TIMEOUT], s[PLAN] = tonumber(ARGV[5]), ARGV[6]
recount(s)
write(s)
local holding, missing = {}, {}
for a = 9, #ARGV do holding[ARGV[a]] = true end
local held = redis.call('HGETALL', HELD)
for i = 1, #held, 2 do
  if not holding[held[i]] then
    missing[#missing + 1] = held[i]
    missing[#missing + 1] = held[i + 1]
    missing[#missing + 1] = redis.call('ZSCORE', ENDS, held[i]) or '0'
  end
end
return {1, missing}
