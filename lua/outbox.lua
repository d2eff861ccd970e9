-- Reads the outbox for one forwarder at a time: else each report would be published by every process that looks.
--
-- ARGV[2] forwarder   ARGV[3] how long it has it to itself (ms); then it may have died   ARGV[4] entries at most, 0: it only keeps what it
-- has for another while   ARGV[5] bytes at most, about
-- Returns entries as XRANGE does; none when it is empty or another forwarder has it. That one goes on until nothing is left, so that what
-- is added meanwhile needs nobody else.
local meta = redis.call('HMGET', META, 'forwarder', 'out')
local until_ms, forwarder = string.match(meta[1] or '', '^(%d+) (.*)$')
until_ms = tonumber(until_ms) or 0
-- A time farther away than anybody writes comes from a clock that was set back.
local is_kept = until_ms > now and until_ms <= now + tonumber(ARGV[3])
if is_kept and forwarder ~= ARGV[2] then return {} end
local most, length = tonumber(ARGV[4]), redis.call('XLEN', OUT)
if length == 0 or most == 0 and forwarder ~= ARGV[2] then return {} end
redis.call('HSET', META, 'forwarder', string.format('%.0f %s', now + tonumber(ARGV[3]), ARGV[2]))
if most == 0 then return {} end
local fits = math.floor(tonumber(ARGV[5]) * length / math.max(tonumber(meta[2] or 0), 1))
return redis.call('XRANGE', OUT, '-', '+', 'COUNT', math.max(math.min(most, fits), 1))
