-- Says which limit keys take tasks from SQL: those of which tasks wait there, and at most half as many wait here as may.
-- Also sets and clears the marks of keys, as the caller has found SQL. A key that loses its mark while a task of it is
-- being put into SQL gets it back when the caller finds that task.
--
-- ARGV[2] high water in bytes   ARGV[3] live tasks at most   ARGV[4] keys at most   ARGV[5] keys of which tasks wait in SQL,
-- 8 bytes each   ARGV[6] keys of which none do
-- Returns {how many tasks of each key to bring, keys, 8 bytes each, how many keys have a mark}
local counters = redis.call('HMGET', COUNTERS, 'open_bytes', 'live')
local bytes, high_bytes, live, most_live = tonumber(counters[1] or 0), tonumber(ARGV[2]), tonumber(counters[2] or 0), tonumber(ARGV[3])
for at = 1, #ARGV[6], 8 do redis.call('ZREM', CROWDED, string.sub(ARGV[6], at, at + 7)) end
for at = 1, #ARGV[5], 8 do limits().set_crowded(string.sub(ARGV[5], at, at + 7)) end
settle_limits()
local half, keys = limits().most_waiting(bytes, high_bytes, live, most_live) / 2, {}
-- A full shard takes none.
if bytes < high_bytes and live < most_live then
  keys = redis.call('ZRANGE', CROWDED, '-inf', half, 'BYSCORE', 'LIMIT', 0, ARGV[4])
end
return {half, keys, redis.call('ZCARD', CROWDED)}
