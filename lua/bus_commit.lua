-- Moves the committed position of a partition forward, never back, and drops the entries up to it: the reader is past
-- them.
--
-- KEYS[1] -> <p>:{bus}:<topic>:<partition>             the stream
-- KEYS[2] -> <p>:{bus}:<topic>:<partition>:committed   a stream id, "ms-seq"
-- ARGV[1] ms   ARGV[2] seq   (numbers compare exactly up to 2^53: ms until the year 287396, seq far beyond one ms)
-- Returns 1 the position moved | 0 it already was there or further on

local ms, seq = tonumber(ARGV[1]), tonumber(ARGV[2])
local before = redis.call('GET', KEYS[2])
if before then
  local before_ms, before_seq = before:match('^(%d+)-(%d+)$')
  before_ms, before_seq = tonumber(before_ms), tonumber(before_seq)
  if ms < before_ms or (ms == before_ms and seq <= before_seq) then
    return 0
  end
end
redis.call('SET', KEYS[2], ARGV[1] .. '-' .. ARGV[2])
-- MINID keeps its id, so the first id to keep is the next possible one.
redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[1] .. '-' .. string.format('%.0f', seq + 1))
return 1
