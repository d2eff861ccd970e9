-- Lists the shared sessions of a slot that are due: their workers were silent for too long, or the
-- process that was ending them died. Also lists processes that died.
--
-- KEYS[1] -> <p>:{sessions:<n>}:due         zset: session and worker -> when it ends unless a call comes (ms)
-- KEYS[2] -> <p>:{sessions:<n>}:processes   zset: process with streams -> until when it lives (ms)
-- ARGV[2] the longest time-out (ms)   ARGV[3] the most sessions of an answer   ARGV[4] how long a process lives (ms)
-- Returns {how long until the next is due (ms), -1 there is none, {a process that died, …}, session and worker, …}
local DUE, PROCESSES, latest, lives = KEYS[1], KEYS[2], now + tonumber(ARGV[2]), now + tonumber(ARGV[4])
-- No process writes a time farther away, so the clock was set back.
for _, far in ipairs(redis.call('ZRANGEBYSCORE', DUE, string.format('(%.0f', latest), '+inf', 'LIMIT', 0, 1000)) do
  redis.call('ZADD', DUE, latest, far)
end
for _, far in ipairs(redis.call('ZRANGEBYSCORE', PROCESSES, string.format('(%.0f', lives), '+inf', 'LIMIT', 0, 100)) do
  redis.call('ZADD', PROCESSES, lives, far)
end
local answer = redis.call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, ARGV[3])
local first = redis.call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
table.insert(answer, 1, redis.call('ZRANGEBYSCORE', PROCESSES, '-inf', now, 'LIMIT', 0, 10))
table.insert(answer, 1, first[2] and math.max(0, first[2] - now) or -1)
return answer
