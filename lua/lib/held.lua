
-- Lease tokens: the check of a token, and the codes that scripts answer per item.
-- NOT_LIMITED: the report has a hold or a pace, and the task has no limit key. Nothing was changed.
local OK, REPEAT, LEASE_LOST, ALREADY_COMPLETED, UNKNOWN_TASK, CANCELLED, NOT_LIMITED = 1, 2, 3, 4, 5, 6, 7

-- Returns the index of the grant's pair in a flat {worker, grant, …} list.
local function find_grant(list, grant)
  for i = 2, #list, 2 do if list[i] == grant then return i - 1 end end
end
local function remove_pair(list, i)
  table.remove(list, i)
  table.remove(list, i)
end

-- Returns whether a lease with this deadline was extended since its session learned the deadline
-- `known` (ms). An extension writes a deadline with a fraction, half a millisecond before the one
-- that the worker was told (lib/lease.lua). A whole deadline that is lower was moved by clamp(),
-- because the clock stepped back.
local function was_extended(deadline, known)
  if deadline > 0 and deadline < known and deadline % 1 == 0 then return false end
  return math.ceil(deadline) ~= known
end

-- Checks a token (generation and grant) against the task's record, as Redis has it.
-- Returns OK, the record, the index of the lease in t[HELD] | another code, and the record if it
-- can be read.
local function held(record, token_generation, grant, worker)
  if not record then return UNKNOWN_TASK end
  local t = load(record)
  if not t then return LEASE_LOST end
  if t[ST] == 'X' then return CANCELLED, t end
  if t[ST] == 'F' or find_worker(t[CREDITED], worker) then return ALREADY_COMPLETED, t end
  local at = token_generation == generation and find_grant(t[HELD], grant)
  if not at or t[HELD][at] ~= worker then return LEASE_LOST, t end
  return OK, t, at
end
