-- Counts the shard again in one step, and compares the result with its counters. Repairs wrong
-- counters, if asked. A shard with more records than a step may read is not counted.
--
-- ARGV[2] 1 repairs, 0 only reports   ARGV[3] records and entries of the outbox at most
-- Returns {1 counted | 0 too large or a record cannot be read, findings}
--   findings: {counter, value, right value, …}
local mends, most = ARGV[2] == '1', tonumber(ARGV[3])
local entries = redis.call('XLEN', OUTBOX)
-- A large body has two fields.
local is_large = redis.call('HLEN', RECORDS) > most or redis.call('HLEN', BODIES) > 2 * most
if is_large or entries > most then return {0, {}} end
local live, open, open_bytes, has_record = 0, 0, 0, {}
local records = redis.call('HGETALL', RECORDS)
for i = 1, #records, 2 do
  has_record[records[i]] = true
  local t = load(records[i + 1])
  -- check.lua reports such a record as a finding.
  if not t then return {0, {}} end
  if t[ST] == 'L' then
    live = live + 1
    if left(t) > 0 then
      open, open_bytes = open + 1, open_bytes + weight_of(records[i])
    end
  end
end
for _, id in ipairs(redis.call('HKEYS', BODIES)) do
  if #id == 16 and not has_record[id] then
    live, open, open_bytes = live + 1, open + 1, open_bytes + weight_of(id)
  end
end
local right = {'live', live, 'open', open, 'open_bytes', open_bytes}
local limit_keys = redis.call('HLEN', LIMITS)
if limit_keys > 0 and limit_keys <= most then
  local behind = 0
  for _, limit in ipairs(redis.call('HKEYS', LIMITS)) do
    if #limit == 8 then behind = behind + limits().tell(limit)[3] end
  end
  right[#right + 1], right[#right + 2] = 'behind', behind
end

-- Count as complete.lua and write_reports() do: without the name of the field b. An outbox that is
-- too large for one step is not counted again.
local MOST_BYTES, PAGE = 4194304, 10
local bytes, from, page = 0, '-', nil
repeat
  page = redis.call('XRANGE', OUTBOX, from, '+', 'COUNT', PAGE)
  for _, entry in ipairs(page) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      bytes = bytes + #fields[i + 1]
      if fields[i] ~= 'b' then bytes = bytes + #fields[i] end
    end
    from = '(' .. entry[1]
  end
until #page < PAGE or bytes > MOST_BYTES
if bytes <= MOST_BYTES then right[#right + 1], right[#right + 2] = 'outbox_bytes', bytes end

local finds = {}
local function compare(name, number, wanted)
  if number ~= wanted then
    local n = #finds
    finds[n + 1], finds[n + 2], finds[n + 3] = name, string.format('%.0f', number), string.format('%.0f', wanted)
    if mends then redis.call('HSET', COUNTERS, name, string.format('%.0f', wanted)) end
  end
end
for i = 1, #right, 2 do
  compare(right[i], tonumber(redis.call('HGET', COUNTERS, right[i]) or 0) or 0, right[i + 1])
end
-- The foremost pointer lies at most at the head.
for lane = 1, 6 do
  local front = tonumber(redis.call('HGET', COUNTERS, 'front' .. lane) or 0)
  local head = tonumber(redis.call('GET', C(lane)) or 0) + redis.call('LLEN', T(lane))
  if front > head then compare('front' .. lane, front, head) end
end
return {1, finds}
