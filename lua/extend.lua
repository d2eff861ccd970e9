-- Makes leases run until `by` from now, with the same tokens. A worker that extends a lease has received it.
--
-- ARGV[2…] per item 5 values: id, generation, grant, worker, by (ms)
--   After all items, one more value if taskd extends the leases by itself, and the worker may not
--   have received them yet:
--   '' all of them | msgpack array: per item the deadline (ms) that the lease must have
-- Returns per item {code, deadline (ms)}; lib/held.lua names the codes
--   OK and 0: the lease has another deadline and was not changed, because its worker went on with
--   it elsewhere
local answers, longest, by_taskd = {}, 0, #ARGV % 5 == 2
local known = by_taskd and ARGV[#ARGV] ~= '' and cmsgpack.unpack(ARGV[#ARGV])
for a = 2, #ARGV - 4, 5 do
  local id, grant, by = ARGV[a], ARGV[a + 2], tonumber(ARGV[a + 4])
  local code = held(record_of(id), ARGV[a + 1], grant, ARGV[a + 3])
  local deadline = code == OK and known and tonumber(redis.call('ZSCORE', LEASES, id .. grant) or 0)
  local stays = deadline and was_extended(deadline, known[(a + 3) / 5])
  if code == OK and not stays then
    -- The deadline no longer tells when the lease was claimed (lib/lease.lua).
    redis.call('ZADD', LEASES, now + by - 0.5, id .. grant)
    if by_taskd then
      redis.call('ZADD', UNDELIVERED, 'XX', 'GT', now + by, grant)
    else
      redis.call('ZREM', UNDELIVERED, grant)
    end
    longest = math.max(longest, by)
  end
  answers[#answers + 1] = {code, code == OK and not stays and now + by or 0}
end
if longest > tonumber(redis.call('HGET', COUNTERS, 'longest_lease') or 0) then
  redis.call('HSET', COUNTERS, 'longest_lease', longest)
end
return answers
