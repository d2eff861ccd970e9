-- Says where the outbox begins and ends. Changes nothing.
--
-- Returns {the last id that it ever had, its first id or nil}, "ms-seq"; 0-0 if it has had none
if redis.call('EXISTS', OUTBOX) == 0 then return {'0-0'} end
local answer = redis.call('XINFO', 'STREAM', OUTBOX)
local info = {}
for i = 1, #answer, 2 do
  info[answer[i]] = answer[i + 1]
end
local first = info['first-entry']
return {info['last-generated-id'], first and first[1]}
