-- Opens a shared session, or goes on with one: its demand begins anew.
--
-- ARGV[4] 1 a new one, 0 go on   ARGV[5] time-out (ms)   ARGV[6] plan
-- ARGV[7] the most shared sessions of all workers in this slot   ARGV[8…] ids of the tasks that the worker has in hand
-- Returns {code, {the worker's other shared sessions}, {id, started and token, deadline, …}}
--   code: 1 it is open | 0 there is none to go on with | 2 there are too many
--   the tasks are those in hand that the worker does not have; they stay in hand until a report
local s
if ARGV[4] == '1' then
  if redis.call('ZCARD', DUE) >= tonumber(ARGV[7]) then return {2, {}, {}} end
  s = {0, 0, 0, 0, ''}
else
  s = alive()
  if not s then return {0, {}, {}} end
end
s[TIMEOUT], s[DEMAND], s[PLAN] = tonumber(ARGV[5]), 0, ARGV[6]
recount(s)
write(s)
local others, holding, missing = {}, {}, {}
for _, other in ipairs(redis.call('HKEYS', SESSIONS)) do
  if other ~= session and string.sub(other, 1, 1) ~= 'p' then others[#others + 1] = other end
end
for a = 8, #ARGV do holding[ARGV[a]] = true end
local held = redis.call('HGETALL', HELD)
for i = 1, #held, 2 do
  if not holding[held[i]] then
    missing[#missing + 1] = held[i]
    missing[#missing + 1] = held[i + 1]
    missing[#missing + 1] = redis.call('ZSCORE', ENDS, held[i]) or '0'
  end
end
return {1, others, missing}
