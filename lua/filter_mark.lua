-- Marks keys of stored tasks in the filter of a queue. A filter of an era before is dropped: SQL was set back since,
-- and may not have its tasks. Has no head: it is no shard's.
--
-- KEYS[1] -> <p>:{<queue>}:seen   hash: key hash -> task id, and `era`
-- ARGV[1] era   ARGV[2…] key hash, task id, …
-- Returns how many keys the filter has
local era = redis.call('HGET', KEYS[1], 'era')
if era ~= ARGV[1] then
  -- The caller has not learned of the present one yet.
  if era and tonumber(era) > tonumber(ARGV[1]) then return redis.call('HLEN', KEYS[1]) - 1 end
  redis.call('UNLINK', KEYS[1])
  redis.call('HSET', KEYS[1], 'era', ARGV[1])
end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
return redis.call('HLEN', KEYS[1]) - 1
