-- Returns the final records that are older than the grace time, the earliest first. A time in the
-- future comes from a clock that was set back, and is set to now. Entries of past ends, and entries
-- that are no ids, are removed from the list.
--
-- ARGV[2] grace time (ms)   ARGV[3] at most, 3,000 or less
-- Returns how many entries were removed, and the ids in one string
local ids = redis.call('LRANGE', FINALS, 0, tonumber(ARGV[3]) - 1)
if #ids == 0 then return {0, ''} end

-- Define the functions for records only when a record is met that is not in a text form.
local function make_records()
  -- include lib/record.lua
  return load, save, AT, drop_past_end
end
local load, save, AT, drop_past_end

-- All records of one call of complete have the same time, so parse each time only once.
local records, times = redis.call('HMGET', RECORDS, unpack(ids)), {}
local before, due, waits, left = now - tonumber(ARGV[2]), {}, false, 0
-- `past` is by index: whether the entry is removed. `changed` is by id: records to write.
local past, changed = {}, {}
for i = 1, #ids do
  local id, record, at = ids[i], records[i], nil
  local form = record and string.byte(record)
  -- 'f<ms>:', or 'e<1 byte><ms>\n' if NUM > 1.
  local from, to = 2, form == 102 and string.find(record, ':', 2, true)
  if form == 101 then from, to = 3, string.find(record, '\n', 3, true) end
  if to then
    local stamp = string.sub(record, from, to - 1)
    at = times[stamp]
    if not at then
      at = tonumber(stamp)
      times[stamp] = at
    end
  end
  if #id ~= 16 then
    past[i], left = true, left + 1
  elseif record and (not at or at > now) then
    if not load then load, save, AT, drop_past_end = make_records() end
    local t = changed[id] or load(record)
    at = t and t[AT]
    if drop_past_end(t) then
      past[i], changed[id], left = true, t, left + 1
    elseif at and at > now then
      at, t[AT], changed[id] = now, now, t
    end
  end
  if not past[i] then
    -- A damaged record is due at once.
    waits = waits or at and at > before
    if not waits then due[#due + 1] = id end
  end
end
if left > 0 then
  redis.call('LTRIM', FINALS, #ids, -1)
  local stay = {}
  for i = #ids, 1, -1 do
    if not past[i] then stay[#stay + 1] = ids[i] end
  end
  if #stay > 0 then redis.call('LPUSH', FINALS, unpack(stay)) end
end
local fields = {}
for id, t in pairs(changed) do fields[#fields + 1], fields[#fields + 2] = id, save(t) end
if #fields > 0 then redis.call('HSET', RECORDS, unpack(fields)) end
return {left, table.concat(due)}
