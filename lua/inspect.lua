-- Reads records. Changes nothing.
--
-- ARGV[2…] ids
-- Returns {stored offset with its topic generation or '', answer per id}
--   answer: 0 no record, or a damaged one | {status L|F|D|X, NUM, credited, held, failures, waiting, epoch of the task}
local answers = {redis.call('GET', OFFSET) or ''}
local ids = {}
for a = 2, #ARGV do ids[#ids + 1] = ARGV[a] end
for i, record in ipairs(hmget(RECORDS, ids)) do
  record = record or fresh(ids[i])
  local t = record and load(record)
  if t then
    answers[i + 1] = {t[ST], t[NUM], #t[CREDITED] / 2, #t[HELD] / 2, t[FAILS], waiting(t), t[EPOCH] or 0}
  else
    -- A damaged record counts as none: the reconciler brings the task back.
    answers[i + 1] = 0
  end
end
return answers
