-- Appends records to a partition that has a bound in bytes. Each entry says how many bytes and
-- records were appended before it. So the size of the stream follows from its first and its last
-- entry, and no counter can drift.
--
-- KEYS[1] -> <p>:{bus}:<topic>:<partition> or <p>:{topic:<topic>:<partition>}:log   the stream: v the record,
--            before '<bytes> <records>'; in a log also k its key, a its attributes, i its id, unless they are empty
-- ARGV[1] most bytes   ARGV[2] most records (0: no bound)
-- ARGV[3] what to do above: 'refuse', or 'trim' the oldest, as logs do
-- 'refuse': ARGV[4…] records
-- 'trim': ARGV[4] greatest age in ms (0: no bound)   ARGV[5…] of each record: v, k, a, i
-- Returns the ids; of a log, if there are no records to append, how many left for the bounds in bytes and records (1000
-- at most) | an error FULL: nothing was appended
local STREAM, most_bytes, most_records = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local is_log = ARGV[3] == 'trim'
local OTHERS = {'k', 'a', 'i'}

-- Reads the totals before an entry, and its own bytes. An entry that this script did not write has no totals.
local function read(entries)
  if #entries == 0 then return nil end
  local entry = {id = entries[1][1], bytes = 0, records = 0, own = 0}
  local fields = entries[1][2]
  for i = 1, #fields, 2 do
    if fields[i] == 'before' then
      local bytes, records = string.match(fields[i + 1], '^(%d+) (%d+)$')
      entry.bytes, entry.records, entry.is_noted = tonumber(bytes), tonumber(records), true
    else
      entry.own = entry.own + #fields[i + 1]
    end
  end
  return entry
end

local first = read(redis.call('XRANGE', STREAM, '-', '+', 'COUNT', 1))
local bytes, records, newest = 0, 0, nil
if first then
  local last = read(redis.call('XREVRANGE', STREAM, '+', '-', 'COUNT', 1))
  bytes, records, newest = last.bytes + last.own, last.records + 1, last.id
  if not last.is_noted then
    -- Totals must never go back: if they were below those of the first entry, the stream would look
    -- empty for a long time.
    bytes, records = first.bytes + first.own + last.own, first.records + redis.call('XLEN', STREAM)
  end
elseif is_log and redis.call('EXISTS', STREAM) == 1 then
  -- All entries have left. Their number goes on, so that readers learn how many they missed.
  local info = redis.call('XINFO', 'STREAM', STREAM)
  for i = 1, #info, 2 do
    if info[i] == 'entries-added' then records = info[i + 1] end
  end
end

if first and not is_log then
  local size, span, length = bytes - first.bytes, records - first.records, redis.call('XLEN', STREAM)
  -- Readers acknowledge in any order, which leaves gaps. A gap counts as an average entry.
  if span > length then size = size * length / span end
  for a = 4, #ARGV do size = size + #ARGV[a] end
  if size > most_bytes then
    return redis.error_reply(string.format('FULL %.0f bytes are not read yet; at most %.0f', size, most_bytes))
  end
end

local ids = {}
for a = is_log and 5 or 4, #ARGV, is_log and 4 or 1 do
  local before = string.format('%.0f %.0f', bytes, records)
  local others = {}
  bytes, records = bytes + #ARGV[a], records + 1
  for f = 1, is_log and 3 or 0 do
    local other = ARGV[a + f]
    if other ~= '' then
      others[#others + 1], others[#others + 2] = OTHERS[f], other
      bytes = bytes + #other
    end
  end
  ids[#ids + 1] = redis.call('XADD', STREAM, '*', 'v', ARGV[a], 'before', before, unpack(others))
end

if is_log and first and ARGV[4] ~= '0' then
  local oldest = redis.call('TIME')[1] * 1000 - ARGV[4]
  redis.call('XTRIM', STREAM, 'MINID', '~', string.format('%.0f', math.max(oldest, 0)))
  first = read(redis.call('XRANGE', STREAM, '-', '+', 'COUNT', 1))
end
local removed = 0
if is_log and first then
  newest = ids[#ids] or newest
  -- Removes a few more than were appended, so that a lowered bound is reached step by step. The newest entry stays.
  for _ = 1, #ids > 0 and 2 * #ids + 16 or 1000 do
    local is_over = bytes - first.bytes > most_bytes or (most_records > 0 and records - first.records > most_records)
    if not is_over or first.id == newest then break end
    redis.call('XDEL', STREAM, first.id)
    removed = removed + 1
    first = read(redis.call('XRANGE', STREAM, '-', '+', 'COUNT', 1))
  end
end
return is_log and #ids == 0 and removed or ids
