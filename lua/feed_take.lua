-- Takes items from a list of somebody else, and keeps them in a hash beside it until they are
-- acknowledged. The field of an item is its time and its number.
-- KEYS: the list, the hash  ARGV: how many at most, LPOP or RPOP, 1 to keep them
-- Answers field and item, one after the other. Nothing if the hash is gone, because then the numbers
-- would begin again.
local answer = {}
local keeps = ARGV[3] == '1'
if redis.call('EXISTS', KEYS[2]) == 0 then
  return false
end
local time = redis.call('TIME')
local at = time[1] .. string.format('%03d', math.floor(time[2] / 1000))
for _ = 1, tonumber(ARGV[1]) do
  local item = redis.call(ARGV[2], KEYS[1])
  if not item then
    break
  end
  local field = at .. '-' .. redis.call('HINCRBY', KEYS[2], 'number', 1)
  if keeps then
    redis.call('HSET', KEYS[2], field, item)
  end
  answer[#answer + 1] = field
  answer[#answer + 1] = item
end
return answer
