
-- The lengths of leases, and when they began. A deadline is a whole millisecond if the lease has
-- the length in the body's head and was not extended. All other deadlines (of extended leases, or
-- of another length) lie half a millisecond before a whole one. This changes no comparison with the
-- time, and says that the length does not tell when the lease began.

-- How long the task's own leases last (ms).
local function lease_of(id)
  local head = redis.call('HGET', BODIES, redis.call('HSTRLEN', BODIES, id) > LARGE and id .. 'h' or id)
  return head and #head >= HEAD and struct.unpack('>I4', string.sub(head, 6, 9)) or 0
end

-- Returns when the lease with this deadline began (ms), or nil if that is unknown.
local function began(id, deadline)
  local length = deadline and deadline % 1 == 0 and lease_of(id) or 0
  if length > 0 and length < deadline then return deadline - length end
end
