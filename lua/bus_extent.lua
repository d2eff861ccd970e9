-- Says where a partition begins and ends. XINFO STREAM alone would send the first and the last value along.
--
-- KEYS[1] -> <p>:{bus}:<topic>:<partition>             the stream
-- KEYS[2] -> <p>:{bus}:<topic>:<partition>:committed   a stream id, "ms-seq"
-- Returns {last id ever appended, first id that is still there or nil, highest id that was ever
--          deleted, committed id or nil, how many entries were ever appended}; an id is 0-0 if
--          there never was one

local committed = redis.call('GET', KEYS[2])
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'0-0', false, '0-0', committed, 0}
end
local answer = redis.call('XINFO', 'STREAM', KEYS[1])
local info = {}
for i = 1, #answer, 2 do
  info[answer[i]] = answer[i + 1]
end
local first = info['first-entry']
return {info['last-generated-id'], first and first[1], info['max-deleted-entry-id'], committed, info['entries-added']}
