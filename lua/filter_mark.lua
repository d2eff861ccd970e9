-- Marks keys of stored tasks in the filter of a queue. Drops a filter of an earlier era: SQL has
-- been set back since then, and may not have the tasks of the filter.
--
-- KEYS[1] -> <p>:{<queue>}:seen   hash: key hash -> task id, and `era`
-- ARGV[1] era   ARGV[2…] key hash, task id, …
-- Returns how many keys the filter has | minus the filter's era, if it is a later one: nothing was changed
local era = redis.call('HGET', KEYS[1], 'era')
if era ~= ARGV[1] then
  -- The caller's era is an earlier one: it does not know the present era yet, or Redis has lost
  -- that.
  if era and tonumber(era) > tonumber(ARGV[1]) then return -tonumber(era) end
  redis.call('UNLINK', KEYS[1])
  redis.call('HSET', KEYS[1], 'era', ARGV[1])
end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
return redis.call('HLEN', KEYS[1]) - 1
