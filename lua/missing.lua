-- Names the tasks that the shard does not have: a walk over all that SQL calls published asks so, and nearly always
-- hears of none. Changes nothing.
--
-- ARGV[2] ids of all in one string
-- Returns {stored offset with its topic generation or '', place (from 1), …}. A task with a damaged record counts as
--   missing: the reconciler brings it back.
local ids = {}
for i = 1, #ARGV[2] / 16 do ids[i] = string.sub(ARGV[2], 16 * i - 15, 16 * i) end
local records, answer = hmget(RECORDS, ids), {redis.call('GET', OFFSET) or ''}
for i = 1, #ids do
  -- Most tasks that wait have no record.
  local record = records[i] or fresh(ids[i])
  if record ~= '1' and not (record and load(record)) then answer[#answer + 1] = i end
end
return answer
