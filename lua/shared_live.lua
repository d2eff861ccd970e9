-- Renews the deadline of a process with allotments. Tells it whether Redis took it for dead or
-- lacks some of its allotments: then it writes them again.
--
-- KEYS[1] -> <p>:{sessions:<n>}:processes            zset: process with streams -> until when it lives (ms)
-- KEYS[2] -> <p>:{sessions:<n>}:workers:<process>    set: the workers of whom the process has an allotment
-- ARGV[2] process   ARGV[3] how long it lives from now on (ms)   ARGV[4] how many allotments it knows of
-- Returns 1 if it was not alive or Redis has fewer of its allotments, else 0
local PROCESSES, WORKERS, process = KEYS[1], KEYS[2], ARGV[2]
local lived = tonumber(redis.call('ZSCORE', PROCESSES, process) or 0) > now
redis.call('ZADD', PROCESSES, now + tonumber(ARGV[3]), process)
return lived and redis.call('SCARD', WORKERS) >= tonumber(ARGV[4]) and 0 or 1
