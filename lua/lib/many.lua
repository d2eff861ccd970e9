
-- Calls with many arguments, and counting.

-- Lua's stack holds nearly 8,000 values, so longer argument lists are sent in pieces of an even
-- number of values.
local function call_all(command, key, args)
  for from = 1, #args, 6000 do
    redis.call(command, key, unpack(args, from, math.min(from + 5999, #args)))
  end
end
local function hmget(key, ids)
  local got = {}
  for from = 1, #ids, 6000 do
    local part = redis.call('HMGET', key, unpack(ids, from, math.min(from + 5999, #ids)))
    for i = 1, #part do got[from + i - 1] = part[i] end
  end
  return got
end
local function count(field, by)
  if by ~= 0 then redis.call('HINCRBY', COUNTERS, field, by) end
end
