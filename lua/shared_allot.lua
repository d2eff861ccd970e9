-- Sets how many tasks a worker's streams in one process may have in hand and on demand, so that the
-- worker's cap holds over all processes.
--
-- KEYS[1] -> <p>:{sessions:<n>}:of:<worker>          hash: session -> its entry; `p` and process -> allotment
-- KEYS[2] -> <p>:{sessions:<n>}:processes            zset: process with streams -> until when it lives (ms)
-- KEYS[3] -> <p>:{sessions:<n>}:workers:<process>    set: the workers of whom the process has an allotment
-- ARGV[2] worker   ARGV[3] process   ARGV[4] how long it lives from now on (ms)
-- ARGV[5] how many it asks for; 0: it has no stream of this worker any more
-- ARGV[6] how many of these it uses already
-- ARGV[7] the most of a worker
-- Returns {its allotment, 1 if that is less than it asked for and other streams of the worker may
--          hold more than they use}
local SESSIONS, PROCESSES, WORKERS = unpack(KEYS)
local worker, process, asked, used = ARGV[2], ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[6])
local beside, streams = 0, 0
local all = asked > used and redis.call('HGETALL', SESSIONS) or {}
for i = 1, #all, 2 do
  local name = all[i]
  if string.sub(name, 1, 1) ~= 'p' then
    -- An entry (lib/shared.lua): its demand, its tasks in hand, and the latest deadline of these.
    local s = cmsgpack.unpack(all[i + 1])
    beside = beside + s[2]
    if not s[7] or s[7] > now then beside = beside + s[3] end
  elseif name ~= 'p' .. process then
    -- A process that died has no streams.
    local lives = tonumber(redis.call('ZSCORE', PROCESSES, string.sub(name, 2)) or 0)
    if lives > now then streams = streams + tonumber(all[i + 1]) end
  end
end
local allotment = math.max(used, math.min(asked, tonumber(ARGV[7]) - beside - streams))
-- An allotment of 0 is not stored, because `shared_live` counts the allotments.
if allotment > 0 then
  redis.call('HSET', SESSIONS, 'p' .. process, allotment)
  redis.call('SADD', WORKERS, worker)
  redis.call('ZADD', PROCESSES, now + tonumber(ARGV[4]), process)
else
  redis.call('HDEL', SESSIONS, 'p' .. process)
  redis.call('SREM', WORKERS, worker)
end
return {allotment, allotment < asked and streams > 0 and 1 or 0}
