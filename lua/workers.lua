-- Counts the leases of each worker. Changes nothing.
--
-- ARGV[2] leases to read, at most: those that end first
-- Returns {leases that were not read, worker, leases, worker, leases, …}
local members = redis.call('ZRANGE', LEASES, 0, ARGV[2] - 1)
local counts, names = {}, {}
for _, member in ipairs(members) do
  local id, grant = string.sub(member, 1, 16), string.sub(member, 17)
  local record = record_of(id)
  local t = record and load(record)
  for i = 1, t and #t[HELD] or 0, 2 do
    if t[HELD][i + 1] == grant then
      local worker = t[HELD][i]
      if not counts[worker] then names[#names + 1] = worker end
      counts[worker] = (counts[worker] or 0) + 1
    end
  end
end
local answer = {redis.call('ZCARD', LEASES) - #members}
for _, worker in ipairs(names) do
  answer[#answer + 1], answer[#answer + 2] = worker, counts[worker]
end
return answer
