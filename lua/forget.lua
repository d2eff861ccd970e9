-- Forgets final records that SQL has, so that finished tasks cost nothing. The others go to the end
-- of the list, and finals.lua returns them again. The caller names the records in the order of the
-- list. The script stops at the first one that another caller has dealt with.
--
-- Meanwhile the task may have been sent again. Then the entry is of a past end, and only the entry
-- is removed. If a record is younger than the grace time, it is not the one that finals.lua
-- returned: SQL may not have this end yet, so the record stays. A live record stays, too, and its
-- entry is removed.
--
-- ARGV[2] flags, one character per record: 1 SQL shows the task final | 0 not yet   ARGV[3] grace time (ms)
-- ARGV[4] their ids in one string, at most 3,000
-- Returns how many records were forgotten
local first = redis.call('LRANGE', FINALS, 0, #ARGV[4] / 16 - 1)
local same = 0
while first[same + 1] and first[same + 1] == string.sub(ARGV[4], 16 * same + 1, 16 * same + 16) do same = same + 1 end
if same == 0 then return 0 end

-- Define the functions for records only when a record is met that is not in a text form.
local function make_records()
  -- include lib/record.lua
  return load, save, ST, AT, drop_past_end
end
local load, save, ST, AT, drop_past_end

-- All records of one call of complete have the same time, so parse each time only once, as in
-- finals.lua.
local records, times = redis.call('HMGET', RECORDS, unpack(first, 1, same)), {}
local before, forgotten, kept, changed, loaded = now - tonumber(ARGV[3]), {}, {}, {}, {}
for i = 1, same do
  local record, is_old, leaves = records[i], true, false
  local form = record and string.byte(record)
  local from, to = 2, form == 102 and string.find(record, ':', 2, true)
  if form == 101 then from, to = 3, string.find(record, '\n', 3, true) end
  if to then
    local stamp = string.sub(record, from, to - 1)
    is_old = times[stamp]
    if is_old == nil then
      is_old = (tonumber(stamp) or 0) <= before
      times[stamp] = is_old
    end
  elseif record then
    if not load then load, save, ST, AT, drop_past_end = make_records() end
    -- A task that was sent again twice may have two entries here. Both decrement the count.
    local t = loaded[first[i]] or load(record)
    is_old, leaves = not t or t[AT] <= before, t and t[ST] == 'L'
    if drop_past_end(t) then
      leaves = true
      loaded[first[i]] = t
      changed[#changed + 1], changed[#changed + 2] = first[i], save(t)
    end
  end
  if not leaves then
    if is_old and string.byte(ARGV[2], i) == 49 then
      forgotten[#forgotten + 1] = first[i]
    else
      kept[#kept + 1] = first[i]
    end
  end
end
redis.call('LTRIM', FINALS, same, -1)
if #changed > 0 then redis.call('HSET', RECORDS, unpack(changed)) end
if #kept > 0 then redis.call('RPUSH', FINALS, unpack(kept)) end
if #forgotten > 0 then
  redis.call('HDEL', RECORDS, unpack(forgotten))
  redis.call('HINCRBY', COUNTERS, 'forgets', 1)
end
return #forgotten
