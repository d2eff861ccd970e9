-- Forgets final records that SQL has, so that finished tasks cost nothing. The others go to the end of the list, and
-- finals.lua names them again. The caller names the records in the order of the list; the script stops where another
-- caller was faster.
--
-- ARGV[2] flags, one character per record: 1 SQL shows the task final | 0 not yet
-- ARGV[3…] ids, at most 3,000
-- Returns how many records were forgotten
local first = redis.call('LRANGE', FINALS, 0, #ARGV - 3)
local same = 0
while first[same + 1] and first[same + 1] == ARGV[same + 3] do same = same + 1 end
if same == 0 then return 0 end

local forgotten, kept = {}, {}
for i = 1, same do
  if string.byte(ARGV[2], i) == 49 then forgotten[#forgotten + 1] = first[i] else kept[#kept + 1] = first[i] end
end
redis.call('LTRIM', FINALS, same, -1)
if #kept > 0 then redis.call('RPUSH', FINALS, unpack(kept)) end
if #forgotten > 0 then redis.call('HDEL', RECORDS, unpack(forgotten)) end
return #forgotten
