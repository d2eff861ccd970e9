-- Cancels tasks: ends their leases and backoffs, and keeps final records. If a task has not arrived
-- yet, its final record is written in advance, so that the task is recognised when its record on
-- the bus comes. This step decides between the cancellation and a completion: the first one counts.
--
-- ARGV[2] wake channel   ARGV[3…] per item 3 values: id, NUM, epoch of the task
-- Returns the generation, then a code per item:
--   1 cancelled, now or before | 2 completed before | 3 dead before
--   4 the record is of a later epoch: the task was sent again since. Nothing was changed
local answers, ended = {tonumber(generation)}, {}
local ENDS = {X = 1, F = 2, D = 3}
for a = 3, #ARGV, 3 do
  local id, epoch = ARGV[a], tonumber(ARGV[a + 2])
  local record = record_of(id)
  local t = record and load(record)
  local own = t and (t[EPOCH] or 0)
  local code = 1
  if t and own > epoch then
    code = 4
  elseif t and t[ST] ~= 'L' and own == epoch then
    code = ENDS[t[ST]]
  elseif t and t[ST] == 'L' then
    if epoch > 0 then t[EPOCH] = epoch end
    if #t[HELD] > 0 then ended[#ended + 1] = id end
    finish(id, t, 'X')
    redis.call('HSET', RECORDS, id, save(t))
  else
    -- The task has not arrived, or only the end of an earlier epoch is there. A record that cannot
    -- be read counts as none.
    count('fence', 1)
    local x = {'X', tonumber(ARGV[a + 1]), 0, {}, {}, {}, now}
    if epoch > 0 then x[EPOCH], x[OFFER] = epoch, t and t[OFFER] or 0 end
    if t then x[PAST] = (t[PAST] or 0) + 1 end
    if record and not t then forget_limit(id, record) end
    drop_body(id)
    redis.call('HSET', RECORDS, id, save(x))
    redis.call('RPUSH', FINALS, id)
  end
  answers[#answers + 1] = code
end
settle_limits()
-- The processes whose sessions hold these tasks notify their workers.
if #ended > 0 then redis.call('PUBLISH', ARGV[2], '!' .. table.concat(ended)) end
return answers
