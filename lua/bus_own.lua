-- Renews the deadline of an ordered reader and tells it which partitions it owns. A partition has at most one owner.
-- The living readers share the partitions evenly: each gives up what exceeds its share, and takes partitions without a
-- living owner.
--
-- KEYS[1] -> <p>:{bus}:readers:<topic>   zset: reader -> until when it lives (ms)
-- KEYS[2] -> <p>:{bus}:owners:<topic>    hash: partition -> "<tenure> <reader>"; field n: the last tenure of any owner
-- ARGV[2] reader   ARGV[3] how long it lives from now on (ms), 0: it leaves   ARGV[4] how many partitions there are
-- Returns {partition, tenure, …} of the partitions that it owns now. A partition that it had lost meanwhile has another
-- tenure.
local me, lives, partitions = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if lives > 0 then
  -- No reader writes a deadline beyond this one, so the clock was set back. A living reader renews its deadline; that
  -- of a dead one passes.
  for _, reader in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%.0f', now + lives), '+inf')) do
    redis.call('ZADD', KEYS[1], now + lives, reader)
  end
  redis.call('ZADD', KEYS[1], now + lives, me)
else
  redis.call('ZREM', KEYS[1], me)
end

-- Sort by name, so that all readers see the same order: if the shares differ, the first readers
-- have one partition more.
local readers = redis.call('ZRANGE', KEYS[1], 0, -1)
table.sort(readers)
local living, share = {}, 0
for rank, reader in ipairs(readers) do
  living[reader] = true
  if reader == me then
    share = math.floor(partitions / #readers) + (rank <= partitions % #readers and 1 or 0)
  end
end

local owners = {}
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do owners[all[i]] = all[i + 1] end

local mine, free = {}, {}
for partition = 0, partitions - 1 do
  local field = tostring(partition)
  local tenure, reader = string.match(owners[field] or '', '^(%d+) (.*)$')
  if reader == me then
    if #mine / 2 < share then
      mine[#mine + 1] = partition
      mine[#mine + 1] = tonumber(tenure)
    else
      redis.call('HDEL', KEYS[2], field)
    end
  elseif not living[reader or ''] then
    free[#free + 1] = partition
  end
end
for _, partition in ipairs(free) do
  if #mine / 2 >= share then break end
  local tenure = redis.call('HINCRBY', KEYS[2], 'n', 1)
  redis.call('HSET', KEYS[2], partition, string.format('%.0f %s', tenure, me))
  mine[#mine + 1] = partition
  mine[#mine + 1] = tenure
end
return mine
