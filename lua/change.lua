-- Gives tasks another NUM or priority. A live task with replicas left is offered in a new element,
-- and its older ones no longer count. If NUM falls below the replicas that are out, the latest
-- backoffs and leases end, at no cost. If it falls to the credits, the task is completed. Notifies
-- the sessions whose leases end.
--
-- ARGV[2] wake channel   ARGV[3] queue
-- then per item 5 values: id, NUM, priority (1 to 3), epoch of the task, what to append to the body if it changes
-- Returns the generation, then per item a code and the number of credited workers:
--   1 changed, now or before | 2 completed | 3 dead | 4 the record is of a later epoch | 5 the task has not arrived
--   6 cancelled
local answers, offered, is_absent = {tonumber(generation)}, false, false
local ENDS = {F = 2, D = 3, X = 6}

-- Takes back the replicas beyond NUM: first those that wait, then those that were claimed last.
local function close_excess(id, t)
  if t[WAIT][1] == '' then return end
  local excess = #t[CREDITED] / 2 + #t[HELD] / 2 + #t[WAIT] - t[NUM]
  while excess > 0 and #t[WAIT] > 0 do
    redis.call('ZREM', DELAYED, id .. table.remove(t[WAIT]))
    excess = excess - 1
  end
  while excess > 0 and #t[HELD] > 0 do
    local grant = table.remove(t[HELD])
    redis.call('ZREM', LEASES, id .. grant)
    lose(id, grant)
    if t.limit then limits().lease_ended(t.limit, id) end
    table.remove(t[HELD])
    excess = excess - 1
  end
end

-- Returns the body without the values that an earlier change appended: the protobuf fields at its
-- end that are NUM or priority. A body that cannot be parsed is returned whole.
local NUM_TAG, PRIORITY_TAG = 5 * 8, 6 * 8
local function without_tail(body)
  local at, kept = HEAD + 1, HEAD
  local function varint()
    local value, factor = 0, 1
    for _ = 1, 10 do
      local byte = string.byte(body, at)
      if not byte then return nil end
      at, value, factor = at + 1, value + byte % 128 * factor, factor * 128
      if byte < 128 then return value end
    end
  end
  while at <= #body do
    local tag = varint()
    local form, length = tag and tag % 8, nil
    if form == 0 then length = varint() and 0
    elseif form == 1 then length = 8
    elseif form == 2 then length = varint()
    elseif form == 5 then length = 4 end
    if not length or at + length > #body + 1 then return body end
    at = at + length
    if tag ~= NUM_TAG and tag ~= PRIORITY_TAG then kept = at - 1 end
  end
  return string.sub(body, 1, kept)
end

-- Rewrites the body: puts the priority into its head, and appends the fields that workers see. If a
-- field comes twice, the last one counts.
local function rewrite_body(id, priority, tail)
  local body = redis.call('HGET', BODIES, id)
  if not body or #body < HEAD then return end
  body = string.char(priority) .. string.sub(without_tail(body), 2) .. tail
  redis.call('HSET', BODIES, id, body)
  if #body > LARGE then redis.call('HSET', BODIES, id .. 'h', string.sub(body, 1, head_length(body))) end
  if #body > tonumber(redis.call('HGET', COUNTERS, 'largest_body') or 0) then
    redis.call('HSET', COUNTERS, 'largest_body', #body)
  end
end

for a = 4, #ARGV, 5 do
  local id, num, priority, epoch = ARGV[a], tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local record = record_of(id)
  local t = record and load(record)
  local own, code = t and (t[EPOCH] or 0), 5
  if t and own > epoch then
    code = 4
  elseif t and t[ST] == 'L' then
    code = 1
    if t[NUM] ~= num or head_of(id) ~= priority then
      if left(t) > 0 then
        count('open', -1)
        count('open_bytes', -weight_of(id))
      end
      t[NUM] = num
      close_excess(id, t)
      rewrite_body(id, priority, ARGV[a + 4])
      if #t[CREDITED] / 2 >= num then
        finish(id, t, 'F')
        code = 2
      elseif left(t) > 0 then
        count('open', 1)
        count('open_bytes', weight_of(id))
        t[OFFER] = (t[OFFER] or 0) + 1
        put_offer(id, t, lane_of(priority, true))
        offered = true
      elseif t.limit then
        limits().pass(t.limit, id)
      end
      redis.call('HSET', RECORDS, id, save(t))
    end
  elseif t and own == epoch then
    code = ENDS[t[ST]]
  elseif not t then
    is_absent = true
  end
  answers[#answers + 1], answers[#answers + 2] = code, t and #t[CREDITED] / 2 or 0
end
-- A process that read such a task from SQL before the change, and was held up since then, must not
-- enqueue it with the old values.
if is_absent then count('fence', 1) end
tell_lost(ARGV[2])
settle_limits()
if offered then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return answers
