-- Removes outbox entries that are on the bus now, and wakes claims that were paused.
--
-- ARGV[2] wake channel   ARGV[3] queue   ARGV[4] outbox entries, ARGV[5] outbox bytes at which claims pause
-- ARGV[6] forwarder   ARGV[7] bytes of the entries   ARGV[8…] entry ids
-- Returns how many entries are left
local function is_full()
  return redis.call('XLEN', OUTBOX) >= tonumber(ARGV[4])
    or tonumber(redis.call('HGET', COUNTERS, 'outbox_bytes') or 0) >= tonumber(ARGV[5])
end
local full = is_full()
local entries = {}
for a = 8, #ARGV do entries[#entries + 1] = ARGV[a] end
local removed = 0
for from = 1, #entries, 6000 do
  removed = removed + redis.call('XDEL', OUTBOX, unpack(entries, from, math.min(from + 5999, #entries)))
end
local rest = redis.call('XLEN', OUTBOX)
if rest == 0 then
  -- An empty outbox has no bytes, so a wrong count ends here.
  redis.call('HDEL', COUNTERS, 'outbox_bytes')
  -- Give up the outbox, so that any forwarder may take the next report.
  if string.match(redis.call('HGET', COUNTERS, 'forwarder') or '', ' (.*)$') == ARGV[6] then
    redis.call('HDEL', COUNTERS, 'forwarder')
  end
elseif removed == #entries then
  count('outbox_bytes', -math.min(tonumber(ARGV[7]), tonumber(redis.call('HGET', COUNTERS, 'outbox_bytes') or 0)))
end
if full and not is_full() then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return rest
