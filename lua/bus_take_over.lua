-- Renews a shared reader's deadline, takes over the entries of dead readers, and removes dead readers that hold
-- nothing. It ignores Redis's idle times: after a clock that was set back they are zero, and no reader would look dead.
--
-- KEYS[1] -> <p>:{bus}:<topic>:<partition>   the stream
-- KEYS[2] -> <p>:{bus}:readers:<topic>       zset: reader -> until when it lives (ms)
-- ARGV[2] group   ARGV[3] reader   ARGV[4] how long it lives from now on (ms)   ARGV[5] most entries
-- Returns {1 there is more to take over | 0, entries as XRANGE has them}
local group, me, lives, most = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

-- No reader writes a deadline beyond this one, so the clock was set back.
for _, reader in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%.0f', now + lives), '+inf')) do
  redis.call('ZADD', KEYS[2], now + lives, reader)
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
redis.call('ZADD', KEYS[2], now + lives, me)

local entries, more = {}, 0
for _, answer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], group)) do
  local consumer = {}
  for i = 1, #answer, 2 do consumer[answer[i]] = answer[i + 1] end
  local name = consumer['name']
  if not redis.call('ZSCORE', KEYS[2], name) then
    local ids = {}
    if consumer['pending'] > 0 and #entries < most then
      for _, held in ipairs(redis.call('XPENDING', KEYS[1], group, '-', '+', most - #entries, name)) do
        ids[#ids + 1] = held[1]
      end
      -- XCLAIM drops deleted entries: no reader holds them afterwards.
      for _, entry in ipairs(redis.call('XCLAIM', KEYS[1], group, me, 0, unpack(ids))) do
        entries[#entries + 1] = entry
      end
    end
    if #ids < consumer['pending'] then
      more = 1
    else
      redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, name)
    end
  end
end
return {more, entries}
