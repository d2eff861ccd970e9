-- Removes outbox entries that stand on the bus now; wakes claims that were paused.
--
-- ARGV[2] wake channel   ARGV[3] queue   ARGV[4] outbox entries, ARGV[5] outbox bytes at which claims pause   ARGV[6] forwarder
-- ARGV[7] bytes of the entries   ARGV[8…] entry ids
-- Returns how many entries are left
local function is_full()
  return redis.call('XLEN', OUT) >= tonumber(ARGV[4])
    or tonumber(redis.call('HGET', META, 'out') or 0) >= tonumber(ARGV[5])
end
local full = is_full()
local entries = {}
for a = 8, #ARGV do entries[#entries + 1] = ARGV[a] end
local removed = 0
for from = 1, #entries, 6000 do
  removed = removed + redis.call('XDEL', OUT, unpack(entries, from, math.min(from + 5999, #entries)))
end
local rest = redis.call('XLEN', OUT)
if rest == 0 then
  -- An empty outbox has no bytes: what was counted wrong is right again.
  redis.call('HDEL', META, 'out')
  -- Whoever reports from now on finds nobody at it.
  if string.match(redis.call('HGET', META, 'forwarder') or '', ' (.*)$') == ARGV[6] then
    redis.call('HDEL', META, 'forwarder')
  end
elseif removed == #entries then
  count('out', -math.min(tonumber(ARGV[7]), tonumber(redis.call('HGET', META, 'out') or 0)))
end
if full and not is_full() then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return rest
