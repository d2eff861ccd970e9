-- Decodes what the shard holds, for people. Changes nothing.
--
-- ARGV[2] entries of each key at most
-- Returns msgpack: a map, with ids in hex. Absent keys and empty lists are left out.
local most = tonumber(ARGV[2])
local function hex(text)
  return (string.gsub(text, '.', function(c) return string.format('%02x', string.byte(c)) end))
end
-- Some deadlines lie half a millisecond before a whole one.
local function whole(score) return score and math.ceil(tonumber(score)) or nil end
local function shown(list) if #list > 0 then return list end end

local function decoded(id, record)
  local t = load(record)
  if not t then return {id = hex(id), unreadable = hex(string.sub(record, 1, 64))} end
  local credited, held, failed, rests, log = {}, {}, {}, {}, {}
  for i = 1, #t[CREDITED], 2 do credited[#credited + 1] = t[CREDITED][i] end
  for i = 1, #t[HELD], 2 do
    held[#held + 1] = {worker = t[HELD][i], grant = t[HELD][i + 1],
      expires_ms = whole(redis.call('ZSCORE', LEASES, id .. t[HELD][i + 1]))}
  end
  for i = 1, #(t[FAILED] or {}), 2 do
    local name, value = t[FAILED][i], t[FAILED][i + 1]
    if string.byte(name) == 9 then
      rests[#rests + 1] = {worker = string.sub(name, 2), until_ms = value}
    else
      failed[#failed + 1] = {worker = name, failures = value}
    end
  end
  for i = 1, #(t[LOG] or {}), 3 do
    log[#log + 1] = {at_ms = t[LOG][i], worker = t[LOG][i + 1], reason = t[LOG][i + 2]}
  end
  local waits = {}
  for _, grant in ipairs(t[WAIT]) do
    waits[#waits + 1] = {grant = grant, due_ms = tonumber(redis.call('ZSCORE', DELAYED, id .. grant) or nil)}
  end
  return {id = hex(id), status = t[ST], num = t[NUM], failures = t[FAILS], left = left(t), offer = t[OFFER] or 0,
    epoch = t[EPOCH] or 0, final_at_ms = t[AT] > 0 and t[AT] or nil, body_bytes = redis.call('HSTRLEN', BODIES, id),
    credited = shown(credited), held = shown(held), waits = shown(waits), failed = shown(failed), log = shown(log),
    rests = #rests > 0 and rests or nil}
end

-- The first members of a sorted set, by time. A member is an id and a grant, or a grant alone.
local function by_time(zset, has_id)
  local list, members = {}, redis.call('ZRANGE', zset, 0, most - 1, 'WITHSCORES')
  for i = 1, #members, 2 do
    local member = members[i]
    list[#list + 1] = {id = has_id and hex(string.sub(member, 1, 16)) or nil,
      grant = has_id and string.sub(member, 17) or member, at_ms = whole(members[i + 1])}
  end
  return shown(list)
end

-- Most waiting tasks have no stored record. Of these, show the ones that come first in their lanes.
local names, lanes, records = {'hr', 'h', 'mr', 'm', 'lr', 'l'}, {}, {}
for lane = 1, 6 do
  local length, gone = redis.call('LLEN', T(lane)), tonumber(redis.call('GET', C(lane)) or 0)
  local elements, pointers = {}, {}
  local texts = redis.call('LRANGE', T(lane), -most, -1)
  for i = #texts, 1, -1 do
    local ok, element = pcall(cmsgpack.unpack, texts[i])
    local id = id_of(texts[i])
    local stored = redis.call('HGET', RECORDS, id)
    local record = stored or fresh(id)
    local t = record and load(record)
    if t and not stored then records[#records + 1] = decoded(id, record) end
    elements[#elements + 1] = {place = gone + #texts - i, id = hex(id), num = ok and element[1] or nil,
      offer = ok and element[2] or nil, spent = not (ok and t and left(t) > 0 and is_offer(t, texts[i]))}
  end
  local page = redis.call('HSCAN', P(lane), '0', 'COUNT', most)[2]
  for i = 1, math.min(#page, 2 * most), 2 do pointers[#pointers + 1] = {worker = page[i], passed = page[i + 1]} end
  if length > 0 or gone > 0 or #pointers > 0 then
    lanes[#lanes + 1] =
      {lane = names[lane], length = length, gone = gone, elements = shown(elements), pointers = shown(pointers)}
  end
end

-- The entries of limit keys, as lib/limits.lua has them.
local limits, stored = {}, redis.call('HSCAN', LIMITS, '0', 'COUNT', most)[2]
for i = 1, math.min(#stored, 2 * most), 2 do
  local form, text = string.sub(stored[i + 1], 1, 1), string.sub(stored[i + 1], 2)
  local ok, entry = true, {form == 'l' and text or '', form == 'o' and text or '', 0, 0, 0}
  if form ~= 'l' and form ~= 'o' then ok, entry = pcall(cmsgpack.unpack, stored[i + 1]) end
  if #stored[i] == 8 and ok and type(entry) == 'table' and #entry >= 5 then
    limits[#limits + 1] = {key = hex(stored[i]), leased = #entry[1] / 16, offered = #entry[2] / 17, waiting = entry[5],
      next_start_ms = entry[3] > 0 and entry[3] or nil, hold_ms = entry[4] > 0 and entry[4] or nil,
      wakes_ms = whole(redis.call('ZSCORE', STARTS, stored[i]))}
  end
end
local crowded, marks = {}, redis.call('ZRANGE', CROWDED, 0, most - 1, 'WITHSCORES')
for i = 1, #marks, 2 do crowded[#crowded + 1] = {key = hex(marks[i]), waiting = tonumber(marks[i + 1])} end

local page = redis.call('HSCAN', RECORDS, '0', 'COUNT', most)[2]
for i = 1, math.min(#page, 2 * most), 2 do records[#records + 1] = decoded(page[i], page[i + 1]) end
local counters, flat = {}, redis.call('HGETALL', COUNTERS)
for i = 1, #flat, 2 do counters[flat[i]] = flat[i + 1] end
local finals = redis.call('LRANGE', FINALS, 0, most - 1)
for i = 1, #finals do finals[i] = hex(finals[i]) end
return cmsgpack.pack({now_ms = now, generation = generation, offset = redis.call('GET', OFFSET) or nil,
  counters = #flat > 0 and counters or nil, lanes = shown(lanes), records = shown(records),
  records_count = redis.call('HLEN', RECORDS), bodies_count = redis.call('HLEN', BODIES),
  leases = by_time(LEASES, true), leases_count = redis.call('ZCARD', LEASES),
  delayed = by_time(DELAYED, true), delayed_count = redis.call('ZCARD', DELAYED),
  undelivered = by_time(UNDELIVERED, false), finals = shown(finals), finals_count = redis.call('LLEN', FINALS),
  limits = shown(limits), crowded = shown(crowded), lines_count = #limits > 0 and redis.call('HLEN', LINES) or nil,
  outbox_entries = redis.call('XLEN', OUTBOX)})
