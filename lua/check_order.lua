-- Lists a page of a lane, or of the final records. The caller compares pages with records, and lets check_task confirm
-- what it suspects. Changes nothing.
--
-- ARGV[2] lane (1 to 6), 0: the list of final records
-- ARGV[3] where to begin. In a lane: at this element, counted from the first that it ever had. In
--         the list of final records: how many to skip at its end, where it grows
-- ARGV[4] entries at most
-- Returns {where the next page begins or -1, {id, offer, …}}; invalid elements are left out
local lane, from, most = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local listed = {}
if lane == 0 then
  local ids = redis.call('LRANGE', FINALS, -from - most, -from - 1)
  for i = 1, #ids do listed[2 * i - 1], listed[2 * i] = ids[i], 0 end
  return {#ids == most and from + most or -1, listed}
end
local gone = tonumber(redis.call('GET', C(lane)) or 0)
local first = math.max(from - gone, 0)
local elements = redis.call('LRANGE', T(lane), -first - most, -first - 1)
for i = #elements, 1, -1 do
  local ok, element = pcall(cmsgpack.unpack, elements[i])
  local id = ok and type(element) == 'table' and (element[4] or element[3])
  if type(id) == 'string' and #id == 16 and type(element[2]) == 'number' then
    listed[#listed + 1], listed[#listed + 2] = id, element[2]
  end
end
return {#elements == most and gone + first + most or -1, listed}
