-- Offers tasks again: ends their leases and backoffs at no cost. Notifies the sessions that held
-- them.
--
-- ARGV[2] wake channel   ARGV[3] queue
-- then per item 5 values: id, epoch of the task, mode, worker, until (ms)
--   mode: 'all' every worker may get it, also one that was refused
--     | 'away' only the lease of this worker ends, and it does not get the task again
--     | 'to' only this worker gets it, until somebody requeues it again; taskd does so at `until`
--     | 'free' ends a reservation whose time is over: leases go on
-- Returns the generation, then two values per item, a code and the end of a reservation (ms) for 9:
--   1 done | 2 completed | 3 dead | 4 the record is of a later epoch | 5 the task is not in the queue | 6 cancelled
--   7 its time has not come | 8 the worker has completed it | 9 the end of its reservation has not come
local answers, offered = {tonumber(generation)}, false
local ENDS = {F = 2, D = 3, X = 6}

local function end_leases(id, t)
  for i = 2, #t[HELD], 2 do
    redis.call('ZREM', LEASES, id .. t[HELD][i])
    lose(id, t[HELD][i])
    if t.limit then limits().lease_ended(t.limit, id) end
  end
  for _, grant in ipairs(t[WAIT]) do redis.call('ZREM', DELAYED, id .. grant) end
  t[HELD], t[WAIT] = {}, {}
end

local function end_lease_of(id, t, worker)
  local at = find_worker(t[HELD], worker)
  if not at then return end
  redis.call('ZREM', LEASES, id .. t[HELD][at + 1])
  lose(id, t[HELD][at + 1])
  if t.limit then limits().lease_ended(t.limit, id) end
  remove_pair(t[HELD], at)
end

-- Refuses the task to the worker. A second pair keeps how often the worker has failed it, even if
-- NUM is 1: NUM may be raised later, and then one worker alone must not kill the task.
local function refuse(t, worker)
  if is_refused(t, worker) then return end
  t[OFFER], t[FAILED] = t[OFFER] or 0, t[FAILED] or {}
  if not find_worker(t[FAILED], worker) then
    table.insert(t[FAILED], worker)
    table.insert(t[FAILED], 0)
  end
  table.insert(t[FAILED], 1, REFUSED)
  table.insert(t[FAILED], 1, worker)
end

-- Lets the worker get the task again. If the worker had failed it as often as it may, all these
-- failures have been counted: one more makes it ineligible again, and costs nothing.
local function lift(id, t, worker)
  if not is_refused(t, worker) then return end
  local list = t[FAILED]
  remove_pair(list, find_worker(list, worker))
  local before = find_worker(list, worker)
  if not before then
    local _, max_attempts = head_of(id)
    list[#list + 1], list[#list + 2] = worker, max_attempts
  elseif list[before + 1] == 0 then
    remove_pair(list, before)
  end
end

local function lift_all(id, t)
  local refused = {}
  for i = 1, #(t[FAILED] or {}), 2 do
    if t[FAILED][i + 1] == REFUSED then refused[#refused + 1] = t[FAILED][i] end
  end
  for _, worker in ipairs(refused) do lift(id, t, worker) end
end

-- Changes a live task. Returns its code, and the end of a reservation.
local function change(id, t, mode, worker, until_ms)
  if mode == 'free' then
    if not t[RESERVED] then return 1 end
    if t[RESERVED][2] > now then return 9, t[RESERVED][2] end
    t[RESERVED] = nil
  elseif t[WAIT][1] == '' then
    return 7
  elseif mode == 'away' then
    end_lease_of(id, t, worker)
    refuse(t, worker)
    if t[RESERVED] and t[RESERVED][1] == worker then t[RESERVED] = nil end
  else
    end_leases(id, t)
    t[RESERVED] = nil
    if mode == 'all' then
      lift_all(id, t)
    else
      lift(id, t, worker)
      t[EPOCH], t[RESERVED] = t[EPOCH] or 0, {worker, until_ms}
    end
  end
  if left(t) > 0 then
    t[OFFER] = (t[OFFER] or 0) + 1
    put_offer(id, t, lane_of(head_of(id), true))
    offered = true
  end
  return 1
end

for a = 4, #ARGV, 5 do
  local id, epoch, mode = ARGV[a], tonumber(ARGV[a + 1]), ARGV[a + 2]
  local worker, until_ms = ARGV[a + 3], tonumber(ARGV[a + 4])
  local record = record_of(id)
  local t = record and load(record)
  local own, code, ends = t and (t[EPOCH] or 0), 5, 0
  if t and own > epoch then
    code = 4
  elseif t and t[ST] == 'L' then
    local was_open = left(t) > 0
    if mode == 'to' and find_worker(t[CREDITED], worker) then
      code = 8
    else
      code, ends = change(id, t, mode, worker, until_ms)
      if not was_open and left(t) > 0 then
        count('open', 1)
        count('open_bytes', weight_of(id))
      end
      redis.call('HSET', RECORDS, id, save(t))
    end
  elseif t and own == epoch then
    code = ENDS[t[ST]]
  end
  answers[#answers + 1], answers[#answers + 2] = code, ends or 0
end
tell_lost(ARGV[2])
settle_limits()
if offered then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return answers
