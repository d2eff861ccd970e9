-- Opens a shard that has no generation: its new life begins with an empty state, and the records of `pipeline` up to the offset count as
-- enqueued. Two processes may both find that a shard is lost, and the later one must not empty what the other has opened: so the look and
-- the change are one step. What stands in the outbox stays. Has no head: lib/shard.lua refuses a shard without a generation.
--
-- KEYS     as in lib/shard.lua: KEYS[1] generation, KEYS[7] outbox, KEYS[9] stored offset
-- ARGV[1]  now, not used   ARGV[2] number of the life   ARGV[3] '<topic generation>/<major>-<minor>' to begin behind, or ''
-- Returns 1 opened | 0 the shard has a generation: nothing was changed
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i, key in ipairs(KEYS) do
  if i ~= 7 then redis.call('UNLINK', key) end
end
if ARGV[3] ~= '' then redis.call('SET', KEYS[9], ARGV[3]) end
redis.call('SET', KEYS[1], ARGV[2])
return 1
