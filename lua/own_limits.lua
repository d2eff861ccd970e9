-- Takes over own limits that operators set, and releases what may start by them. A caller tells all changes after the
-- version `from` up to `upto`. So a shard that knows a version ignores what came up to it, and an older change never
-- overwrites a newer one; one that has missed changes says so.
--
-- ARGV[2] from   ARGV[3] upto   ARGV[4] limits of the queue (lib/limits.lua), '' those that the shard has
-- then 2 values per change: hash of the limit key ('' all keys), and a msgpack array: version, cleared 0|1, whether it
--   replaces the hold of a worker 0|1, and own limits as lib/limits.lua stores them: at a time, ms between starts,
--   burst, end of the hold (ms)
-- Returns {changes that were new, when time alone lets a limit key go on (ms) or -1} | {-1, -1} the shard knows less than
--         `from`: nothing was changed
local upto, done = tonumber(ARGV[3]), 0
local text = redis.call('HGET', LIMITS, 'o')
local known = text and cmsgpack.unpack(text) or {0, 0}
if known[1] < tonumber(ARGV[2]) then return {-1, -1} end
if upto <= known[1] then return {0, -1} end
limits().set_queue(ARGV[4])
for a = 5, #ARGV - 1, 2 do
  local limit, change = ARGV[a], cmsgpack.unpack(ARGV[a + 1])
  local version, is_cleared, replaces_hold = change[1], change[2], change[3] == 1
  if version > known[1] then
    local had = redis.call('HEXISTS', LIMITS, limit == '' and 'o*' or limit .. 'o')
    if limit ~= '' then known[2] = known[2] - had + 1 - is_cleared end
    limits().set_own(limit, is_cleared == 0 and {unpack(change, 4, 7)} or nil, replaces_hold)
    done = done + 1
  end
end
redis.call('HSET', LIMITS, 'o', cmsgpack.pack({upto, known[2]}))
return {done, settle_limits() or -1}
