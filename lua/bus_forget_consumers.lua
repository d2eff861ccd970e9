-- Removes the consumers of a group that have shown no sign of life for long and hold nothing.
-- In one script, because removing a consumer drops what it holds: between a look and the removal it could be given an entry.
--
-- KEYS[1] -> taskd:{bus}:<topic>:<partition>   the stream
-- ARGV[1] -> group    ARGV[2] -> how long without a sign of life, in ms
-- Returns how many were removed.

local removed = 0
for _, answer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for i = 1, #answer, 2 do
    consumer[answer[i]] = answer[i + 1]
  end
  if consumer['pending'] == 0 and consumer['idle'] > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer['name'])
    removed = removed + 1
  end
end
return removed
