-- Reads the outbox for one forwarder at a time: else each report would be published by every process that looks.
--
-- ARGV[2] forwarder   ARGV[3] how long it has it to itself (ms); then it may have died   ARGV[4] entries at most
-- Returns entries as XRANGE does; none when it is empty or another forwarder has it. That one goes on until nothing is left, so that what
-- is added meanwhile needs nobody else.
local until_ms, forwarder = string.match(redis.call('HGET', META, 'forwarder') or '', '^(%d+) (.*)$')
if until_ms and tonumber(until_ms) > now and forwarder ~= ARGV[2] then return {} end
local entries = redis.call('XRANGE', OUT, '-', '+', 'COUNT', ARGV[4])
if #entries > 0 then
  redis.call('HSET', META, 'forwarder', string.format('%.0f %s', now + tonumber(ARGV[3]), ARGV[2]))
end
return entries
