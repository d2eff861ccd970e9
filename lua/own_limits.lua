-- Takes over own limits that operators set, and releases what may start by them. A caller tells all changes after the
-- version `from` up to `upto`. So a shard that knows a version ignores what came up to it, and an older change never
-- overwrites a newer one; one that has missed changes says so. If a shard knows a version that SQL has not reached, SQL
-- was set back, and the caller lets the shard forget what SQL does not have: all is told it anew after that.
--
-- ARGV[2] from   ARGV[3] upto   ARGV[4] limits of the queue (lib/limits.lua), '' those that the shard has
-- then 2 values per change: hash of the limit key ('' all keys), and a msgpack array: version, cleared 0|1, whether it
--   replaces the hold of a worker 0|1, and own limits as lib/limits.lua stores them: at a time, ms between starts,
--   burst, end of the hold (ms)
-- or     ARGV[2] 'only'   ARGV[3] the version that the shard knew   ARGV[4] not used   then the hashes that stay
-- Returns {changes that were new, in how many ms time alone lets a limit key go on or -1, the version that the shard knew}
--         | {-1, -1, that version} the shard knows less than `from`: nothing was changed
local upto, done = tonumber(ARGV[3]), 0
local text = redis.call('HGET', LIMITS, 'o')
local known = text and cmsgpack.unpack(text) or {0, 0}
if ARGV[2] == 'only' then
  if known[1] ~= upto then return {0, -1, known[1]} end
  local stays, count = {}, 0
  for a = 5, #ARGV do stays[ARGV[a]] = true end
  for _, field in ipairs(redis.call('HKEYS', LIMITS)) do
    local limit = field == 'o*' and '' or #field == 9 and string.sub(field, 1, 8)
    if limit and stays[limit] then
      if limit ~= '' then count = count + 1 end
    elseif limit then
      limits().set_own(limit, nil, false)
      done = done + 1
    end
  end
  redis.call('HSET', LIMITS, 'o', cmsgpack.pack({0, count}))
  return {done, settle_limits() or -1, known[1]}
end
if known[1] < tonumber(ARGV[2]) then return {-1, -1, known[1]} end
if upto <= known[1] or #ARGV < 5 then return {0, -1, known[1]} end
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
return {done, settle_limits() or -1, known[1]}
