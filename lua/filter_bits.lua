-- Marks numbers of stored tasks in the bitmap of a queue: a string of 8 KiB for each 65,536
-- numbers. Drops some chunks at random if there are more than the caller allows.
--
-- KEYS[1] -> <p>:{<queue>}:bits   set of chunks. The bitmap of a chunk is KEYS[1]:<chunk>, in the same slot
-- ARGV[1] the most chunks   ARGV[2…] chunk, bit, …
-- Returns how many chunks there are
local function bitmap(chunk) return KEYS[1] .. ':' .. chunk end
local last
for i = 2, #ARGV, 2 do
  local chunk = ARGV[i]
  redis.call('SETBIT', bitmap(chunk), ARGV[i + 1], 1)
  if chunk ~= last then redis.call('SADD', KEYS[1], chunk) end
  last = chunk
end
local excess = math.min(redis.call('SCARD', KEYS[1]) - tonumber(ARGV[1]), 1000)
if excess > 0 then
  for _, chunk in ipairs(redis.call('SPOP', KEYS[1], excess)) do redis.call('UNLINK', bitmap(chunk)) end
end
return redis.call('SCARD', KEYS[1])
