-- Creates the consumer group, from the first entry on, in every partition where it is missing.
--
-- KEYS -> <p>:{bus}:<topic>:<partition>   the streams
-- ARGV[1] group
-- Returns OK, or the first error
for _, key in ipairs(KEYS) do
  local answer = redis.pcall('XGROUP', 'CREATE', key, ARGV[1], '0', 'MKSTREAM')
  if answer.err and not string.find(answer.err, '^-?BUSYGROUP') then return answer end
end
return redis.status_reply('OK')
