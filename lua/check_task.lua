-- Confirms what pages of lanes and records showed at different moments, and mends it in the same step, if asked. The
-- caller names few tasks: each may cost a walk over its lane.
--
-- ARGV[2] 1 mends, 0 only reports   ARGV[3] elements of a lane to look at one by one, at most
-- ARGV[4] why each is named, a character per id: e SQL shows it final | l it is listed as final | m no lane had it |
--         t a lane had it twice | u the list of final records did not have it   ARGV[5…] ids
-- Returns finds: {kind, id, what is wrong, …}
local mends, most = ARGV[2] == '1', tonumber(ARGV[3])
local finds = {}
local function find(kind, id, text)
  local n = #finds
  finds[n + 1], finds[n + 2], finds[n + 3] = kind, id, text
end

-- The places of the task's newest offer: {lane, index from the head, …}; nil: the lanes are too long to tell.
local function places(id, t)
  local offer, found, is_long = t[OFFER] or 0, {}, false
  for lane = 1, 6 do
    local length = redis.call('LLEN', T(lane))
    for _, at in ipairs(redis.call('LPOS', T(lane), element(t[NUM], offer, id), 'COUNT', 2)) do
      found[#found + 1], found[#found + 2] = lane, at
    end
    is_long = is_long or length > most
    -- The task may have had another NUM when it was offered.
    if #found == 0 and length <= most then
      for at, text in ipairs(redis.call('LRANGE', T(lane), 0, -1)) do
        if id_of(text) == id and is_offer(t, text) then found[#found + 1], found[#found + 2] = lane, at - 1 end
      end
    end
  end
  return (#found > 0 or not is_long) and found or nil
end

local function lane_for(id, t) return lane_of(head_of(id), (t[OFFER] or 0) > 0) end

local function check_listed(id)
  if redis.call('LPOS', FINALS, id) then
    find('live_among_finals', id, 'the task is not final, and is listed as final')
    if mends then redis.call('LREM', FINALS, 0, id) end
  end
end

local function check_offer(id, t)
  local found = left(t) > 0 and places(id, t)
  if found and #found == 0 then
    find('open_without_element', id, left(t) .. ' of its replicas can be claimed, and no lane has it')
    if mends then redis.call('LPUSH', T(lane_for(id, t)), element(t[NUM], t[OFFER] or 0, id)) end
  elseif found and #found > 2 then
    find('element_twice', id, 'it is in a lane twice')
    -- The later one stays: no worker has passed it.
    if mends then spend(found[3], found[1] == found[3] and math.max(found[2], found[4]) or found[4]) end
  end
end

for i = 1, #ARGV[4] do
  local id, why = ARGV[4 + i], string.sub(ARGV[4], i, i)
  local record = redis.call('HGET', RECORDS, id)
  local t = record and load(record)
  local is_live = t and t[ST] == 'L'
  if is_live and why == 'e' then
    find('ended_and_live', id, 'SQL shows it final, and workers can get it')
    if mends then drop(id, t) end
  elseif is_live and why == 'l' then
    check_listed(id)
  elseif is_live then
    check_offer(id, t)
  elseif t and why == 'u' and not redis.call('LPOS', FINALS, id) then
    find('final_not_listed', id, 'the task is final, and no list says so: its record would stay for ever')
    if mends then redis.call('RPUSH', FINALS, id) end
  end
end
return finds
