-- Appends records to a partition that has a bound in bytes. Each entry says how many bytes and
-- records were appended before it. So the size of the stream follows from its first and its last
-- entry, and no counter can drift.
--
-- KEYS[1] -> <p>:{bus}:<topic>:<partition>   the stream: v the record, before '<bytes> <records>'
-- ARGV[1] most bytes   ARGV[2] most records (0: no bound)
-- ARGV[3] what to do above: 'refuse', or 'trim' the oldest
-- ARGV[4…] records
-- Returns the ids | an error FULL: nothing was appended
local STREAM, most_bytes, most_records = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])

-- Reads the totals before an entry, and its own bytes. An entry that this script did not write has no totals.
local function read(entries)
  if #entries == 0 then return nil end
  local entry = {id = entries[1][1], bytes = 0, records = 0, own = 0}
  local fields = entries[1][2]
  for i = 1, #fields, 2 do
    if fields[i] == 'v' then
      entry.own = #fields[i + 1]
    elseif fields[i] == 'before' then
      local bytes, records = string.match(fields[i + 1], '^(%d+) (%d+)$')
      entry.bytes, entry.records, entry.is_noted = tonumber(bytes), tonumber(records), true
    end
  end
  return entry
end

local first = read(redis.call('XRANGE', STREAM, '-', '+', 'COUNT', 1))
local bytes, records = 0, 0
if first then
  local last = read(redis.call('XREVRANGE', STREAM, '+', '-', 'COUNT', 1))
  bytes, records = last.bytes + last.own, last.records + 1
  if not last.is_noted then
    -- Totals must never go back: if they were below those of the first entry, the stream would look
    -- empty for a long time.
    bytes, records = first.bytes + first.own + last.own, first.records + redis.call('XLEN', STREAM)
  end
end

if first and ARGV[3] == 'refuse' then
  local size, span, length = bytes - first.bytes, records - first.records, redis.call('XLEN', STREAM)
  -- Readers acknowledge in any order, which leaves gaps. A gap counts as an average entry.
  if span > length then size = size * length / span end
  for a = 4, #ARGV do size = size + #ARGV[a] end
  if size > most_bytes then
    return redis.error_reply(string.format('FULL %.0f bytes are not read yet; at most %.0f', size, most_bytes))
  end
end

local ids = {}
for a = 4, #ARGV do
  local before = string.format('%.0f %.0f', bytes, records)
  ids[#ids + 1] = redis.call('XADD', STREAM, '*', 'v', ARGV[a], 'before', before)
  bytes, records = bytes + #ARGV[a], records + 1
end

if ARGV[3] == 'trim' and first then
  -- Removes a few more than were appended, so that a lowered bound is reached step by step. The newest entry stays.
  for _ = 1, 2 * #ids + 16 do
    local is_over = bytes - first.bytes > most_bytes or (most_records > 0 and records - first.records > most_records)
    if not is_over or first.id == ids[#ids] then break end
    redis.call('XDEL', STREAM, first.id)
    first = read(redis.call('XRANGE', STREAM, '-', '+', 'COUNT', 1))
  end
end
return ids
