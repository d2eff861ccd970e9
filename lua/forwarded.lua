-- Removes outbox entries that stand on the bus now; wakes claims that were paused.
--
-- ARGV[2] wake channel   ARGV[3] queue   ARGV[4] outbox entries at which claims pause   ARGV[5] forwarder   ARGV[6…] entry ids
-- Returns how many entries are left
local full = redis.call('XLEN', OUT) >= tonumber(ARGV[4])
local entries = {}
for a = 6, #ARGV do entries[#entries + 1] = ARGV[a] end
call_all('XDEL', OUT, entries)
local rest = redis.call('XLEN', OUT)
if full and rest < tonumber(ARGV[4]) then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
-- Whoever reports from now on finds nobody at it.
if rest == 0 and string.match(redis.call('HGET', META, 'forwarder') or '', ' (.*)$') == ARGV[5] then
  redis.call('HDEL', META, 'forwarder')
end
return rest
