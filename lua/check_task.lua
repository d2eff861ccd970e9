-- Confirms suspicions from pages of lanes and records that were read at different moments, and
-- repairs what it confirms in the same step, if asked. Each task may cost a walk over the lanes and
-- over the list of final records. A call ends before a task that exceeds the rest of its budget. If
-- a task exceeds even the whole budget, it stays unchecked: there is no finding, and nothing is
-- repaired.
--
-- ARGV[2] 1 repairs, 0 only reports
-- ARGV[3] the budget: elements to pass at most; one that Lua decodes counts for 40
-- ARGV[4] what is suspected, a character per id: e SQL shows it final or behind others | l it is listed as final
--         | m no lane had it | t a lane had it twice | u the list of final records did not have it
-- ARGV[5…] ids
-- Returns {how many of the ids were dealt with (the caller asks again for the others), how many of
--          these stayed unchecked, elements passed, findings: {kind, id, what is wrong, …}}
local LOOKED_INTO = 40
local mends = ARGV[2] == '1'
local finds, dealt_with, untold = {}, 0, 0
budget = tonumber(ARGV[3])
local function find(kind, id, text)
  local n = #finds
  finds[n + 1], finds[n + 2], finds[n + 3] = kind, id, text
end

-- Returns where the task's newest offer is: {lane, index from the head, …}. Returns nil if the
-- budget ended before and at most one element was found.
local function places(id, t)
  local offer, found, is_cut = t[OFFER] or 0, {}, false
  for lane = 1, 6 do
    local there, cut = search(lane, element(t[NUM], offer, id, t.limit))
    for _, at in ipairs(there) do found[#found + 1], found[#found + 2] = lane, at end
    is_cut = is_cut or cut
  end
  -- The task may have had another NUM when it was offered.
  for lane = 1, #found == 0 and 6 or 0 do
    local length = redis.call('LLEN', T(lane))
    if length * LOOKED_INTO <= budget then
      budget = budget - length * LOOKED_INTO
      for at, text in ipairs(redis.call('LRANGE', T(lane), 0, -1)) do
        if id_of(text) == id and is_offer(t, text) then found[#found + 1], found[#found + 2] = lane, at - 1 end
      end
    else
      is_cut = true
    end
  end
  return (#found > 2 or not is_cut) and found or nil
end

-- Returns true if the list of final records has the task besides its past ends. Otherwise returns
-- false, and how many past ends the list has. Returns nil if the budget ended before.
local function is_listed(id, t)
  local length, past, found = redis.call('LLEN', FINALS), t[PAST] or 0, 0
  local most = math.min(length, budget)
  if most > 0 then
    budget = budget - most
    found = #redis.call('LPOS', FINALS, id, 'COUNT', past + 1, 'MAXLEN', most)
    if found > past then return true end
  end
  if most == length then return false, found end
end

local function lane_for(id, t) return lane_of(head_of(id), (t[OFFER] or 0) > 0) end

-- The checks return false if the budget ended before.
local function check_listed(id, t)
  local listed = is_listed(id, t)
  if listed then
    find('live_among_finals', id, 'the task is not final, and is listed as final')
    if mends then
      budget = budget - redis.call('LLEN', FINALS)
      redis.call('LREM', FINALS, 0, id)
      if t[PAST] then
        t[PAST] = nil
        redis.call('HSET', RECORDS, id, save(t))
      end
    end
  end
  return listed ~= nil
end

local function check_unlisted(id, t)
  local listed, past = is_listed(id, t)
  if listed == false then
    find('final_not_listed', id, 'the task is final, and no list says so: its record would stay for ever')
    if mends then
      redis.call('RPUSH', FINALS, id)
      if (t[PAST] or 0) > past then
        t[PAST] = past > 0 and past or nil
        redis.call('HSET', RECORDS, id, save(t))
      end
    end
  end
  return listed ~= nil
end

local function stands(id, t)
  for priority = 1, t.limit and 3 or 0 do
    if limits().show(t.limit, id, t[OFFER] or 0, priority, math.huge) then return true end
  end
  return false
end

local function check_offer(id, t)
  if left(t) <= 0 then return true end
  local found = places(id, t)
  if found and #found == 0 and stands(id, t) then
    return true
  elseif found and #found == 0 and t.limit then
    find('open_without_element', id, left(t) .. ' of its replicas can be claimed, and it does not wait behind its limit key')
    if mends then limits().enter(t.limit, id, t[OFFER] or 0, head_of(id), true) end
  elseif found and #found == 0 then
    find('open_without_element', id, left(t) .. ' of its replicas can be claimed, and no lane has it')
    if mends then redis.call('LPUSH', T(lane_for(id, t)), element(t[NUM], t[OFFER] or 0, id)) end
  elseif found and #found > 2 then
    find('element_twice', id, 'it is in a lane twice')
    -- Keep the later element, because no worker has passed it.
    if mends then spend(found[3], found[1] == found[3] and math.max(found[2], found[4]) or found[4]) end
  end
  return found ~= nil
end

local function check(id, why)
  local record = record_of(id)
  local t = record and load(record)
  local is_live = t and t[ST] == 'L'
  if is_live and why == 'e' then
    find('ended_and_live', id, 'SQL shows it final or behind others, and workers can get it')
    if mends then drop(id, t) end
  elseif is_live and why == 'l' then
    return check_listed(id, t)
  elseif is_live then
    return check_offer(id, t)
  elseif t and why == 'u' then
    return check_unlisted(id, t)
  end
  return true
end

local whole = budget
for i = 1, #ARGV[4] do
  -- The tasks before have used up the budget, so this one comes first in the next call.
  if i > 1 and budget <= 0 then break end
  local had_all = budget == whole
  local is_told = check(ARGV[4 + i], string.sub(ARGV[4], i, i))
  if not is_told and not had_all then break end
  dealt_with = i
  if not is_told then untold = untold + 1 end
end
settle_limits()
return {dealt_with, untold, whole - budget, finds}
