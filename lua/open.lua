-- Opens a shard that has no generation, or an earlier one that SQL has given up as lost because the
-- call that opened it came too late. The new generation begins with an empty state, and the records
-- of `pipeline` up to the offset count as enqueued. The entries of the outbox stay. Two processes
-- may both find a shard lost, and the later one must not empty the shard that the other has opened.
-- So the check and the change are one step.
-- This is the only script of a shard without lib/shard.lua, which refuses a shard without a
-- generation.
--
-- KEYS     all keys of a shard
-- ARGV[1]  now, not used   ARGV[2] the generation
-- ARGV[3]  '<topic generation>/<major>-<minor>', the offset to begin after, or ''
-- ARGV[4]  the longest time for which own limits of a limit key keep it from starting (ms)   ARGV[5…] own limits, as
--          fields and values of LIMITS (lib/limits.lua)
-- Returns 1 opened | 0 the shard has this generation or a later one: nothing was changed
local present = redis.call('GET', GENERATION)
if present and tonumber(present) >= tonumber(ARGV[2]) then return 0 end
for _, key in ipairs(KEYS) do
  if key ~= OUTBOX then redis.call('UNLINK', key) end
end
if ARGV[3] ~= '' then redis.call('SET', OFFSET, ARGV[3]) end
redis.call('SET', GENERATION, ARGV[2])
-- In the same step, so that no task starts against them.
for from = 5, #ARGV, 6000 do redis.call('HSET', LIMITS, unpack(ARGV, from, math.min(from + 5999, #ARGV))) end
if #ARGV >= 5 then redis.call('HSET', COUNTERS, 'longest_report', ARGV[4]) end
return 1
