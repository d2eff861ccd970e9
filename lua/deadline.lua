-- Ends tasks whose deadline has passed: they are dead, and the entries in the outbox report it. If
-- a task has not arrived yet, its final record is written in advance, so that the task is
-- recognised when its record on the bus comes. This step decides between the deadline and a
-- completion: the first one counts. Notifies the sessions that held the tasks. While the outbox is
-- full, the script does nothing, because workers cannot report then.
--
-- ARGV[2] wake channel   ARGV[3] outbox entries, ARGV[4] outbox bytes at which ends pause
-- ARGV[5…] per item 3 values: id, NUM, reason
-- Returns the generation, then a code per item:
--   1 dead, now | 2 completed before | 3 dead before | 6 cancelled before
--   4 the task was sent again since. Nothing was changed | 0 the outbox is full. Nothing was changed
local answers = {tonumber(generation)}
local is_full = redis.call('XLEN', OUTBOX) >= tonumber(ARGV[3])
  or tonumber(redis.call('HGET', COUNTERS, 'outbox_bytes') or 0) >= tonumber(ARGV[4])
local ENDS = {F = 2, D = 3, X = 6}
for a = 5, #ARGV, 3 do
  local id, reason = ARGV[a], ARGV[a + 2]
  local record = record_of(id)
  local t = record and load(record)
  local code = 1
  if is_full then
    code = 0
  elseif t and (t[EPOCH] or 0) > 0 then
    code = 4
  elseif t and t[ST] ~= 'L' then
    code = ENDS[t[ST]]
  else
    local log = t and t[LOG] or {}
    if t then
      for i = 2, #t[HELD], 2 do lose(id, t[HELD][i]) end
      finish(id, t, 'D')
    else
      -- The task has not arrived. A record that cannot be read counts as none.
      count('fence', 1)
      if record then forget_limit(id, record) end
      t = {'D', tonumber(ARGV[a + 1]), 0, {}, {}, {}, now}
      drop_body(id)
      redis.call('RPUSH', FINALS, id)
    end
    redis.call('HSET', RECORDS, id, save(t))
    report('d', id, 'a', t[FAILS], 'r', reason, 'w', '', 'h', cmsgpack.pack(log))
  end
  answers[#answers + 1] = code
end
write_reports()
settle_limits()
tell_lost(ARGV[2])
return answers
