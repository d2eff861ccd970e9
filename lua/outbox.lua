-- Reads the outbox for one forwarder at a time: otherwise each process that reads it would publish
-- every report.
--
-- ARGV[2] forwarder   ARGV[3] how long it owns the outbox (ms)   ARGV[5] bytes at most, about
-- ARGV[4] entries at most; 0: the forwarder only keeps an outbox that it owns
-- ARGV[6] 1: all entries or none
-- Returns entries as XRANGE does; none if the outbox is empty or another forwarder owns it. The
-- owner goes on until the outbox is empty, including new entries.
--       | how many entries there are: too many or too large, and nothing was changed
local counters = redis.call('HMGET', COUNTERS, 'forwarder', 'outbox_bytes')
local until_ms, forwarder = string.match(counters[1] or '', '^(%d+) (.*)$')
until_ms = tonumber(until_ms) or 0
-- A later time than any forwarder writes comes from a clock that was set back.
local is_kept = until_ms > now and until_ms <= now + tonumber(ARGV[3])
if is_kept and forwarder ~= ARGV[2] then return {} end
local most, length = tonumber(ARGV[4]), redis.call('XLEN', OUTBOX)
if length == 0 or most == 0 and forwarder ~= ARGV[2] then return {} end
local fits = math.min(most, math.floor(tonumber(ARGV[5]) * length / math.max(tonumber(counters[2] or 0), 1)))
if ARGV[6] == '1' and fits < length then return length end
redis.call('HSET', COUNTERS, 'forwarder', string.format('%.0f %s', now + tonumber(ARGV[3]), ARGV[2]))
if most == 0 then return {} end
return redis.call('XRANGE', OUTBOX, '-', '+', 'COUNT', math.max(fits, 1))
