
-- The beginning of every script of a shard, except open.lua. README.md describes the keys.
--
-- GENERATION, RECORDS, … name the keys that the script gets. The line before this one defines them;
-- it is generated from the row of the script in src/redis_pool/scripts.rs. Without a generation,
-- every call is refused.
local generation = redis.call('GET', GENERATION)
if not generation then
  return redis.error_reply('NOGEN the shard has no generation: it was never opened, or Redis lost it')
end
