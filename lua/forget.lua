-- Forgets final records that SQL has, so that finished tasks cost nothing. The others go to the end of the list, and
-- finals.lua names them again. The caller names the records in the order of the list; the script stops where another
-- caller was faster.
--
-- ARGV[2…] per record 2 values: id, '1' SQL shows the task final | '0' not yet
-- Returns how many records were forgotten
local forgotten = {}
for a = 2, #ARGV, 2 do
  if redis.call('LINDEX', FINALS, 0) ~= ARGV[a] then break end
  redis.call('LPOP', FINALS)
  if ARGV[a + 1] == '1' then
    forgotten[#forgotten + 1] = ARGV[a]
  else
    redis.call('RPUSH', FINALS, ARGV[a])
  end
end
call_all('HDEL', RECORDS, forgotten)
return #forgotten
