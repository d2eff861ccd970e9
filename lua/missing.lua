-- Returns which of the given tasks the shard does not have. The walk over all tasks that SQL calls
-- published uses it; nearly always, no task is missing. Changes nothing.
--
-- ARGV[2] the ids in one string
-- Returns {stored offset with its topic generation or '', index (from 1) of a missing task, …}
--   A task with a damaged record counts as missing, so that the reconciler brings it back.
local ids = {}
for i = 1, #ARGV[2] / 16 do ids[i] = string.sub(ARGV[2], 16 * i - 15, 16 * i) end
local records, answer = hmget(RECORDS, ids), {redis.call('GET', OFFSET) or ''}
for i = 1, #ids do
  -- Most waiting tasks have no record.
  local record = records[i] or fresh(ids[i])
  if record ~= '1' and not (record and load(record)) then answer[#answer + 1] = i end
end
return answer
