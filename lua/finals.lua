-- Reads the final records that are older than the grace time, the earliest first. A time in the future comes from a
-- clock that was set back, and becomes now.
--
-- ARGV[2] grace time (ms)   ARGV[3] at most, 3,000 or less
-- Returns their ids
local ids = redis.call('LRANGE', FINALS, 0, tonumber(ARGV[3]) - 1)
if #ids == 0 then return ids end

-- The functions for records are made only for a record that is not in one of the forms that are text.
local function make_records()
  -- include lib/record.lua
  return load, save, AT
end
local load, save, AT

-- The records of one call of complete have one time: each time is read once.
local records, times = redis.call('HMGET', RECORDS, unpack(ids)), {}
local before, due, waits, restamped = now - tonumber(ARGV[2]), {}, false, {}
for i = 1, #ids do
  local record, at = records[i], nil
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
  if record and (not at or at > now) then
    if not load then load, save, AT = make_records() end
    local t = load(record)
    at = t and t[AT]
    if at and at > now then
      at, t[AT] = now, now
      restamped[#restamped + 1], restamped[#restamped + 2] = ids[i], save(t)
    end
  end
  -- A damaged record is due at once.
  waits = waits or at and at > before
  if not waits then due[i] = ids[i] end
end
if #restamped > 0 then redis.call('HSET', RECORDS, unpack(restamped)) end
return due
