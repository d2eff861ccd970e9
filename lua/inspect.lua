-- Reads records. Changes nothing.
--
-- ARGV[2…] ids
-- Returns {stored offset with its topic generation or '', answer per id}: 0 no record | {status L|F|D|X, NUM, credited, held, failures, waiting}
local answers = {redis.call('GET', OFFSET) or ''}
local ids = {}
for a = 2, #ARGV do ids[#ids + 1] = ARGV[a] end
for i, record in ipairs(hmget(REC, ids)) do
  if record then
    local t = load(record)
    answers[i + 1] = {t[ST], t[NUM], #t[CREDITED] / 2, #t[HELD] / 2, t[FAILS], t[WAIT]}
  else
    answers[i + 1] = 0
  end
end
return answers
