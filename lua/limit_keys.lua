-- Reads limit keys of the shard. Changes nothing.
--
-- ARGV[2] cursor of HSCAN, '' for the keys that are named   ARGV[3] entries to look at, about
-- ARGV[4] which of them: 'running', 'waiting', 'held'   ARGV[5…] hashes of named keys
-- Returns {next cursor ('0': the end), now (ms), {hash, name ('' unknown), values of tell() in lib/limits.lua}, …}
local answer = {'0', now}
local function add(limit)
  local told, id = limits().tell(limit)
  local head = ''
  if id ~= '' then
    head = redis.call('HGET', BODIES, redis.call('HSTRLEN', BODIES, id) > LARGE and id .. 'h' or id) or ''
  end
  local ends, found = limited_head(head)
  local name = ''
  if found == limit then name = string.sub(head, string.find(head, limit, HEAD + 1, true) + 8, ends) end
  answer[#answer + 1] = {limit, name, unpack(told)}
end
if ARGV[2] == '' then
  for a = 5, #ARGV do add(ARGV[a]) end
  return answer
end
local page = redis.call('HSCAN', LIMITS, ARGV[2], 'COUNT', ARGV[3])
answer[1] = page[1]
for i = 1, #page[2], 2 do
  local limit = page[2][i]
  if #limit == 8 then
    local told = limits().tell(limit)
    local fits = ARGV[4] == 'running' and told[1] > 0 or ARGV[4] == 'waiting' and told[3] > 0
      or ARGV[4] == 'held' and told[5] > now
    if fits then add(limit) end
  end
end
return answer
