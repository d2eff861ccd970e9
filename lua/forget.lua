-- Forgets final records that SQL has, so that what is finished costs nothing; the others go to the end of the list and are asked for again.
-- The caller names them in the order of the list; where somebody else was faster it stops.
--
-- ARGV[2…] per record 2 values: id, '1' SQL shows it final | '0' not yet
-- Returns how many records were forgotten
local forgotten = {}
for a = 2, #ARGV, 2 do
  if redis.call('LINDEX', FINAL, 0) ~= ARGV[a] then break end
  redis.call('LPOP', FINAL)
  if ARGV[a + 1] == '1' then
    forgotten[#forgotten + 1] = ARGV[a]
  else
    redis.call('RPUSH', FINAL, ARGV[a])
  end
end
call_all('HDEL', REC, forgotten)
return #forgotten
