-- Opens a shard that has no generation, or an earlier one that SQL has given up as lost because the
-- call that opened it came too late. The new generation begins with an empty state, and the records
-- of `pipeline` up to the offset count as enqueued. The entries of the outbox stay. Two processes
-- may both find a shard lost, and the later one must not empty the shard that the other has opened.
-- So the check and the change are one step.
-- This is the only script of a shard without lib/shard.lua, which refuses a shard without a
-- generation.
--
-- KEYS     all keys of a shard
-- ARGV[2]  the generation
-- ARGV[3]  '<topic generation>/<major>-<minor>', the offset to begin after, or ''
-- ARGV[4…] own limits, and entries of limit keys that a worker holds, as fields and values of LIMITS (lib/limits.lua)
-- Returns 1 opened | 0 the shard has this generation or a later one: nothing was changed
local present = redis.call('GET', GENERATION)
if present and tonumber(present) >= tonumber(ARGV[2]) then return 0 end
for _, key in ipairs(KEYS) do
  if key ~= OUTBOX then redis.call('UNLINK', key) end
end
if ARGV[3] ~= '' then redis.call('SET', OFFSET, ARGV[3]) end
redis.call('SET', GENERATION, ARGV[2])
-- In the same step, so that no task starts against them.
for from = 4, #ARGV, 6000 do redis.call('HSET', LIMITS, unpack(ARGV, from, math.min(from + 5999, #ARGV))) end
local longest = nil
for a = 4, #ARGV, 2 do
  if #ARGV[a] == 8 then
    local at = cmsgpack.unpack(ARGV[a + 1])[4]
    redis.call('ZADD', STARTS, at, ARGV[a])
    longest = math.max(longest or 0, at - now)
  end
end
-- A shard that counts as limited is told when time lets a key go on, also if no limited task comes.
if longest then
  redis.call('HSET', COUNTERS, 'longest_start', string.format('%.0f', longest), 'limited', string.format('%.0f', now))
end
return 1
