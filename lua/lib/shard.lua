
-- The beginning of every script of a shard, except open.lua. README.md describes the keys.
--
-- GENERATION, RECORDS, … name the keys that the script gets: a line before this one, made of the script's row in
-- src/redis_pool/scripts.rs. Without a generation every call is refused.
local generation = redis.call('GET', GENERATION)
if not generation then
  return redis.error_reply('NOGEN the shard has no generation: it was never opened, or Redis lost it')
end
