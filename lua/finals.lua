-- Reads the final records that are older than the grace time, the earliest first. A time in the future comes from a
-- clock that was set back, and becomes now. Entries of past ends leave the list, and such that are no ids.
--
-- ARGV[2] grace time (ms)   ARGV[3] at most, 3,000 or less
-- Returns how many entries left, and the ids in one string
local ids = redis.call('LRANGE', FINALS, 0, tonumber(ARGV[3]) - 1)
if #ids == 0 then return {0, ''} end

-- The functions for records are made only for a record that is not in one of the forms that are text.
local function make_records()
  -- include lib/record.lua
  return load, save, AT, drop_past_end
end
local load, save, AT, drop_past_end

-- The records of one call of complete have one time: each time is read once.
local records, times = redis.call('HMGET', RECORDS, unpack(ids)), {}
local before, due, waits, left = now - tonumber(ARGV[2]), {}, false, 0
-- By place, the past ends; by id, the records that change.
local past, changed = {}, {}
for i = 1, #ids do
  local id, record, at = ids[i], records[i], nil
  local form = record and string.byte(record)
  -- 'f<ms>:', or 'e<1 byte><ms>\n' where there are several workers.
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
