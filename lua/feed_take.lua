-- Takes items from a list of somebody else, and keeps them in a hash beside it until they are
-- acknowledged. The field of an item is its time and its number. An item leaves the list last, so
-- that it is in the list or in the hash wherever the script fails.
-- KEYS: the list, the hash  ARGV: how many at most, LPOP or RPOP, 1 to keep them
-- Answers field and item, one after the other. Nothing if the hash is gone, because then the numbers
-- would begin again.
local answer = {}
local most = tonumber(ARGV[1])
local from_left = ARGV[2] == 'LPOP'
local keeps = ARGV[3] == '1'
if redis.call('EXISTS', KEYS[2]) == 0 then
  return false
end
local items
if from_left then
  items = redis.call('LRANGE', KEYS[1], 0, most - 1)
else
  items = redis.call('LRANGE', KEYS[1], -most, -1)
end
local count = #items
if count == 0 then
  return answer
end
-- Changes nothing, but fails if the user may not remove items: otherwise they would be kept again
-- at each call.
redis.call('LTRIM', KEYS[1], 0, -1)
local time = redis.call('TIME')
local at = time[1] .. string.format('%03d', math.floor(time[2] / 1000))
local last = redis.call('HINCRBY', KEYS[2], 'number', count)
for n = 1, count do
  local item = items[from_left and n or count + 1 - n]
  local field = at .. '-' .. string.format('%.0f', last - count + n)
  if keeps then
    redis.call('HSET', KEYS[2], field, item)
  end
  answer[#answer + 1] = field
  answer[#answer + 1] = item
end
if from_left then
  redis.call('LTRIM', KEYS[1], count, -1)
else
  redis.call('LTRIM', KEYS[1], 0, -1 - count)
end
return answer
