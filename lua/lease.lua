-- Takes, keeps or gives up a lease on work that one process at a time does.
--
-- KEYS[1] -> <p>:lease:<what>   string: the holder; expires with the lease
-- ARGV[2] process   ARGV[3] for how long from now on (ms), 0: it gives the lease up
-- Returns 1 the process has the lease | 0 it has not
local process, ms = ARGV[2], tonumber(ARGV[3])
local holder, deadline = redis.call('GET', KEYS[1]), redis.call('PEXPIRETIME', KEYS[1])
-- If a test moved the time, the lease may be over before its key expires, because keys expire by
-- Redis's clock.
if holder and holder ~= process and deadline > now then
  -- No process asks for longer, so the clock was set back.
  if ms > 0 and deadline > now + ms then redis.call('PEXPIREAT', KEYS[1], now + ms) end
  return 0
end
if ms > 0 then
  redis.call('SET', KEYS[1], process, 'PXAT', now + ms)
  return 1
end
redis.call('DEL', KEYS[1])
return 0
