
-- Limits per key. A limited task stands in a lane only while its limit key may start it; the others wait *behind their
-- key*, in a line per priority. All tasks of a limit key are in one shard, so one script sees all of it.
--
-- LIMITS has an entry per limit key that has something, by the first 8 bytes of the key's hash, and under '' the limits
-- of the queue, as enqueue and claim got them last. The own limits of a key, which an operator set, stand under its hash
-- and 'o', those of all keys under 'o*'; 'o' has the version of own limits that the shard knows, and how many keys have
-- some. LINES has the lines, in chunks of up to 64 items. STARTS says when time alone lets a key go on, or its entry may
-- go. CROWDED has the keys of which tasks wait in SQL, because enough of the key wait here, each with how many do.
--
-- Nothing of this costs a call that meets no limited task: limits() makes the functions once one is met, and
-- settle_limits() does at the end of a script, when records and bodies are written, what follows from all of it.
local function make_limits()
  -- include lib/clock.lua
  -- include lib/record.lua
  local sub, byte, char, find = string.sub, string.byte, string.char, string.find
  -- An entry: ids of leased replicas, priority and id of each offered task, earliest next start (ms), end of the hold
  -- (ms), items in the lines, releases so far, then the first and the last chunk of each priority's line, the time between
  -- two starts that a worker asked for (ms), and until when that holds (ms).
  local LEASED, OFFERED, NEXT, HOLD, WAITING, TURN, CHUNKS, ASKED, ASKED_UNTIL = 1, 2, 3, 4, 5, 6, 7, 13, 14
  -- The limits of a queue: at a time (0 no bound), ms between starts (0 none), burst, jitter (percent), whether the time
  -- counts from the end of a lease, wake channel, queue.
  local AT_A_TIME, PACE, BURST, JITTER, FROM_END, CHANNEL, QUEUE = 1, 2, 3, 4, 5, 6, 7
  -- Own limits: at a time (-1 as the queue, 0 nothing starts), ms between starts (-1 as the queue), burst (0 as the
  -- queue), end of the hold (ms).
  local OWN_AT_A_TIME, OWN_PACE, OWN_BURST, OWN_HOLD = 1, 2, 3, 4
  local ID, CHUNK_ITEMS, ITEM = 16, 64, 24
  -- Without a bound so many of a key stand in lanes. A call looks at so many items that count no more.
  local UNBOUNDED, STALE_AT_ONCE = 1000, 1000
  -- So many items of a key wait here at most; in a shard that is half full, in bytes or live tasks, so many.
  local MOST, MOST_IF_HALF_FULL = 4096, 64
  -- How long a report may hold a key, and how long the time between two starts counts that it asks for (ms).
  local LONGEST_REPORT = 3600000
  local LANES = #KEYS - 20

  local queue, stored_text, queue_text, is_walk_due = nil, nil, nil, false
  -- Own limits of all keys; how many keys have own limits; and of entries that are subject to any, what counts for them.
  local own_of_all, keys_with_own, merged = nil, 0, {}
  local function of_queue()
    if not queue then
      local found = redis.call('HMGET', LIMITS, '', 'o', 'o*')
      stored_text = found[1]
      queue = stored_text and cmsgpack.unpack(stored_text) or {0, 0, 1, 0, 0, '', ''}
      if found[2] then keys_with_own = cmsgpack.unpack(found[2])[2] end
      own_of_all = found[3] and cmsgpack.unpack(found[3])
    end
    return queue
  end
  -- The limits as the caller has them, which are those of the shard from now on; '': the settings of the caller have
  -- none, so those of the shard stay. Returns whether they are new: then all keys have to look at their times again.
  local function set_queue(text)
    if text == '' then return false end
    of_queue()
    if stored_text == text then return false end
    queue, queue_text, is_walk_due = cmsgpack.unpack(text), text, stored_text and true
    return is_walk_due
  end

  -- Entries and chunks are read once a call, and written once.
  local entries, touched, chunks, changed_chunks = {}, {}, {}, {}
  local behind, stale_left, longest_report = 0, STALE_AT_ONCE, 0

  -- What counts for a key: its own limits, then those of all keys, then the queue's. At a time it has -1 if nothing
  -- starts.
  local function merge(own)
    local limits = of_queue()
    local all = own_of_all or {-1, -1, 0, 0}
    own = own or {-1, -1, 0, 0}
    local function first(place, least, of_queue)
      if own[place] >= least then return own[place] end
      return all[place] >= least and all[place] or of_queue
    end
    local at_a_time, pace = first(OWN_AT_A_TIME, 0, nil), first(OWN_PACE, 0, nil)
    if at_a_time == 0 then at_a_time = -1 end
    return {at_a_time or limits[AT_A_TIME], pace or limits[PACE], first(OWN_BURST, 1, limits[BURST]), limits[JITTER],
      limits[FROM_END], is_own = true, is_own_pace = pace and true, hold = math.max(own[OWN_HOLD], all[OWN_HOLD])}
  end
  local function limits_of(entry) return merged[entry] or of_queue() end
  local function hold_of(entry) return math.max(entry[HOLD], merged[entry] and merged[entry].hold or 0) end

  -- The time between two starts (ms): that of the limits, or the longer one that a worker asked for, unless an operator
  -- set it; the burst; and what start() adds to a time (ms), which must not keep a burst from starting at once.
  local function pace_of(entry)
    local limits = limits_of(entry)
    local asked = not limits.is_own_pace and entry[ASKED_UNTIL] > now and entry[ASKED] or 0
    local burst = limits[PACE] > 0 and limits[BURST] or 1
    return math.max(limits[PACE], asked), burst, burst > 1 and 1 or 0
  end

  -- The longest that a time of an entry, or of any, may be away (ms). A time farther away was written before the clock
  -- was set back.
  local function longest_pace(pace, burst)
    return math.ceil((burst + 1) * pace * (1 + of_queue()[JITTER] / 100)) + 1
  end
  -- A worker may have asked for a longer pace, which has the jitter and the burst of the queue, too.
  local function longest_wait()
    local limits = of_queue()
    local report = tonumber(redis.call('HGET', COUNTERS, 'longest_report') or 0)
    return longest_pace(math.max(limits[PACE], report), limits[BURST])
  end

  -- When the first replica of a key may start (ms, 0 at once). A shard in a later generation may be one that Redis lost,
  -- with the starts of its keys: nothing starts in the first interval after its first limited task came.
  local function first_start(limits)
    if tonumber(generation) <= 1 or limits[PACE] == 0 then return 0 end
    local since = tonumber(redis.call('HGET', COUNTERS, 'limited') or now)
    local burst = limits[BURST]
    return since + (burst > 1 and 2 or 1) + burst * limits[PACE]
  end

  local function entry_of(limit)
    local entry = entries[limit]
    if entry then return entry end
    local limits, text, own = of_queue(), nil, nil
    if keys_with_own > 0 then
      local found = redis.call('HMGET', LIMITS, limit, limit .. 'o')
      text, own = found[1], found[2] and cmsgpack.unpack(found[2])
    else
      text = redis.call('HGET', LIMITS, limit)
    end
    if own or own_of_all then limits = merge(own) end
    local ok, stored = pcall(cmsgpack.unpack, text or '')
    entry = ok and type(stored) == 'table' and #stored == ASKED_UNTIL and stored
      or {'', '', first_start(limits), 0, 0, 0, 0, -1, 0, -1, 0, -1, 0, 0}
    if limits.is_own then merged[entry] = limits end
    entry[HOLD] = math.min(entry[HOLD], now + 1 + LONGEST_REPORT)
    entry[ASKED_UNTIL] = math.min(entry[ASKED_UNTIL], now + LONGEST_REPORT)
    local pace, burst = pace_of(entry)
    if entry[NEXT] > now + longest_pace(pace, burst) then entry[NEXT] = now + math.ceil(pace) end
    entries[limit] = entry
    return entry
  end
  local function touch(limit)
    local entry = entry_of(limit)
    if not touched[limit] then
      touched[limit] = true
      touched[#touched + 1] = limit
    end
    return entry
  end

  -- The place of an item in a text of items of one width that end with this text.
  local function find_item(text, width, ending)
    local from = 1
    while true do
      local at = find(text, ending, from, true)
      if not at then return nil end
      local start = at + #ending - width
      if start % width == 1 then return start end
      from = at + 1
    end
  end
  local function remove_item(limit, list, width, id)
    local text = entry_of(limit)[list]
    local at = find_item(text, width, id)
    if not at then return false end
    touch(limit)[list] = sub(text, 1, at - 1) .. sub(text, at + width)
    return true
  end

  -- How many replicas of the key may start now.
  local function room(entry)
    local limits = limits_of(entry)
    if hold_of(entry) > now or limits[AT_A_TIME] < 0 then return 0 end
    local free = (limits[AT_A_TIME] > 0 and limits[AT_A_TIME] or UNBOUNDED) - #entry[LEASED] / ID
    local pace, burst, slack = pace_of(entry)
    if pace > 0 then free = math.min(free, math.floor(burst - math.max(entry[NEXT] - now - slack, 0) / pace)) end
    return math.max(free, 0)
  end
  local function may_start(limit) return room(entry_of(limit)) > 0 end

  -- When time alone lets the key start something (ms); not after `now`: it does already.
  local function next_start(entry)
    local pace, burst, slack = pace_of(entry)
    return math.max(pace > 0 and math.ceil(entry[NEXT] - (burst - 1) * pace) - slack or 0, hold_of(entry))
  end

  -- A chunk of a line. `field` names it in LINES.
  local function field_of(limit, priority, number) return limit .. char(priority) .. number end
  local function chunk(field)
    local text = chunks[field]
    if not text then
      text = redis.call('HGET', LINES, field) or ''
      chunks[field] = text
    end
    return text
  end
  local function set_chunk(field, text)
    chunks[field] = text
    if not changed_chunks[field] then
      changed_chunks[field] = true
      changed_chunks[#changed_chunks + 1] = field
    end
  end

  -- The task waits behind its key from now on, as this offer: the last, or the foremost. Earlier items of it count no
  -- more, nor does an element that stands in a lane.
  local function enter(limit, id, offer, priority, foremost)
    if priority < 1 or priority > 3 then priority = 2 end
    remove_item(limit, OFFERED, ID + 1, id)
    local entry, item = touch(limit), id .. struct.pack('>I8', offer)
    local first, last = CHUNKS + 2 * priority - 2, CHUNKS + 2 * priority - 1
    if entry[last] < entry[first] then entry[first], entry[last] = 0, 0 end
    local field = field_of(limit, priority, entry[foremost and first or last])
    local text = chunk(field)
    if #text >= CHUNK_ITEMS * ITEM then
      if foremost then entry[first] = entry[first] - 1 else entry[last] = entry[last] + 1 end
      field, text = field_of(limit, priority, entry[foremost and first or last]), ''
    end
    set_chunk(field, foremost and item .. text or text .. item)
    entry[WAITING], behind = entry[WAITING] + 1, behind + 1
  end

  -- The foremost item of a line: id and offer; nil: the line is empty.
  local function leave(limit, entry, priority)
    local first, last = CHUNKS + 2 * priority - 2, CHUNKS + 2 * priority - 1
    while entry[first] <= entry[last] do
      local field = field_of(limit, priority, entry[first])
      local text = chunk(field)
      if #text <= ITEM then
        entry[first] = entry[first] + 1
        if entry[first] > entry[last] then entry[first], entry[last] = 0, -1 end
      end
      if text ~= '' then
        set_chunk(field, sub(text, ITEM + 1))
        entry[WAITING], behind = entry[WAITING] - 1, behind - 1
        return sub(text, 1, ID), struct.unpack('>I8', sub(text, ID + 1, ITEM))
      end
    end
  end

  -- The element of the task, if this offer of it still counts. A task without a record has only a body.
  local function element_of(limit, id, offer)
    local record = redis.call('HGET', RECORDS, id)
    if not record then return offer == 0 and fresh(id) and element(1, 0, id, limit) or nil end
    local t = load(record)
    if t and t.limit == limit and left(t) > 0 and (t[OFFER] or 0) == offer then
      return element(t[NUM], offer, id, limit)
    end
  end

  -- Puts tasks into lanes, from the highest priority down, while those offered of this or a higher priority are fewer
  -- than what may start. One release in ten begins with the lowest priority, so that none starves.
  local elements, released = {}, 0
  local function release(limit, entry)
    local free = entry[WAITING] > 0 and room(entry) or 0
    if free == 0 then return end
    local offered = {0, 0, 0}
    for at = 1, #entry[OFFERED], ID + 1 do
      local priority = byte(entry[OFFERED], at)
      offered[priority] = offered[priority] + 1
    end
    entry[TURN] = (entry[TURN] + 1) % 10
    local from, to, step = 1, 3, 1
    if entry[TURN] == 0 then from, to, step = 3, 1, -1 end
    for priority = from, to, step do
      local function ahead()
        local sum = 0
        for p = 1, step < 0 and 3 or priority do sum = sum + offered[p] end
        return sum
      end
      while stale_left > 0 and ahead() < free do
        local id, offer = leave(limit, entry, priority)
        if not id then break end
        local found = element_of(limit, id, offer)
        if found then
          local lane = 2 * priority - (offer > 0 and 1 or 0)
          elements[lane] = elements[lane] or {}
          table.insert(elements[lane], found)
          entry[OFFERED] = entry[OFFERED] .. char(priority) .. id
          offered[priority], released = offered[priority] + 1, released + 1
        else
          stale_left = stale_left - 1
        end
      end
    end
  end

  -- A replica starts.
  local function start(limit, id)
    remove_item(limit, OFFERED, ID + 1, id)
    local entry, limits = touch(limit), of_queue()
    entry[LEASED] = entry[LEASED] .. id
    local wait = pace_of(entry)
    if wait > 0 then
      -- Redis's clock is cut to milliseconds: the start may be a millisecond later than `now`.
      if limits[JITTER] > 0 then
        math.randomseed((now + byte(id, 16) * 65536 + #entry[LEASED]) % 2147483647)
        wait = wait * (1 + math.random() * limits[JITTER] / 100)
      end
      entry[NEXT] = math.ceil(math.max(entry[NEXT], now + 1) + wait)
    end
  end

  -- A lease is over. Returns whether there was one.
  local function lease_ended(limit, id)
    if not remove_item(limit, LEASED, ID, id) then return false end
    local entry, limits = entry_of(limit), of_queue()
    if limits[FROM_END] > 0 then entry[NEXT] = math.max(entry[NEXT], math.ceil(now + 1 + pace_of(entry))) end
    return true
  end

  -- A report of a worker: nothing of the key starts for this long, or starts are so far apart (ms). A worker only slows
  -- down.
  local function report(limit, hold, pace)
    local entry = touch(limit)
    longest_report = math.max(longest_report, hold, pace > 0 and LONGEST_REPORT or 0)
    if hold > 0 then entry[HOLD] = math.max(entry[HOLD], now + 1 + math.min(hold, LONGEST_REPORT)) end
    if pace > 0 then
      local before = entry[ASKED_UNTIL] > now and entry[ASKED] or 0
      entry[ASKED], entry[ASKED_UNTIL] = math.max(before, math.min(pace, LONGEST_REPORT)), now + LONGEST_REPORT
      if not limits_of(entry).is_own_pace then entry[NEXT] = math.max(entry[NEXT], now + 1 + entry[ASKED]) end
    end
  end

  -- A worker that may not have the task meets its element, or the task is over: it no longer takes its key's place.
  local function pass(limit, id) return remove_item(limit, OFFERED, ID + 1, id) end

  -- Whether this offer of the task waits behind the key.
  local function stands(limit, id, offer)
    local entry, item = entry_of(limit), id .. struct.pack('>I8', offer)
    for priority = 1, 3 do
      for number = entry[CHUNKS + 2 * priority - 2], entry[CHUNKS + 2 * priority - 1] do
        if find_item(chunk(field_of(limit, priority, number)), ITEM, item) then return true end
      end
    end
    return false
  end

  -- What there is to tell of a task that waits behind its key as this offer: how many are leased, how many may be (0 any
  -- number, -1 none), when time alone lets the next one start (ms), items before it (-1 more than `most`), whether own
  -- limits count (0|1); nil: it does not wait there.
  local function show(limit, id, offer, priority, most)
    local entry, item, before = entry_of(limit), id .. struct.pack('>I8', offer), 0
    local function shown(items)
      return {#entry[LEASED] / ID, limits_of(entry)[AT_A_TIME], math.max(next_start(entry), 0), items,
        merged[entry] and 1 or 0}
    end
    for p = 1, priority do
      for number = entry[CHUNKS + 2 * p - 2], entry[CHUNKS + 2 * p - 1] do
        local text = chunk(field_of(limit, p, number))
        local at = p == priority and find_item(text, ITEM, item)
        if at then return shown(before + (at - 1) / ITEM) end
        before = before + #text / ITEM
        if before > most then return shown(-1) end
      end
    end
  end

  -- The items that wait behind all keys.
  local function count_waiting()
    local sum, stored = 0, redis.call('HGETALL', LIMITS)
    for i = 1, #stored, 2 do
      if #stored[i] == 8 then sum = sum + entry_of(stored[i])[WAITING] end
    end
    return sum
  end

  -- How many leases of each task the entry counts.
  local function leases(limit)
    local counts, text = {}, entry_of(limit)[LEASED]
    for at = 1, #text, ID do
      local id = sub(text, at, at + ID - 1)
      counts[id] = (counts[id] or 0) + 1
    end
    return counts
  end

  -- Whether tasks wait behind the key and nothing wakes it: no lease or element of it is there to end, and no time.
  local function sleeps(limit)
    local entry = entry_of(limit)
    -- Below 0: an operator lets nothing start.
    return entry[WAITING] > 0 and entry[LEASED] == '' and entry[OFFERED] == '' and limits_of(entry)[AT_A_TIME] >= 0
      and not redis.call('ZSCORE', STARTS, limit)
  end
  -- Gives a key own limits, or none (nil); '': all keys. A new hold of an operator replaces that of a worker.
  local function set_own(limit, own, replaces_hold)
    local field = limit == '' and 'o*' or limit .. 'o'
    -- From now on an entry is read with its own limits, also if these are the first ones of the shard.
    of_queue()
    keys_with_own = math.max(keys_with_own, 1)
    if own then
      redis.call('HSET', LIMITS, field, cmsgpack.pack(own))
      longest_report = math.max(longest_report, own[OWN_PACE] * math.max(own[OWN_BURST], 1), own[OWN_HOLD] - now)
    else
      redis.call('HDEL', LIMITS, field)
    end
    if limit == '' then
      own_of_all, is_walk_due = own, true
      return
    end
    -- Of an idle key there is nothing to release.
    if not entries[limit] and redis.call('HEXISTS', LIMITS, limit) == 0 then return end
    local entry = touch(limit)
    merged[entry] = (own or own_of_all) and merge(own) or nil
    if replaces_hold then entry[HOLD] = 0 end
  end

  -- What there is to tell of a key: leased, offered, waiting, when the next may start (ms), end of the hold (ms), at a
  -- time (-1 nothing starts), ms between starts, burst, and a task of it, if there is one.
  local function tell(limit)
    local entry = entry_of(limit)
    local pace, burst = pace_of(entry)
    local id = sub(entry[LEASED], 1, ID)
    if id == '' then id = sub(entry[OFFERED], 2, ID + 1) end
    for priority = 1, 3 do
      if id == '' then id = sub(chunk(field_of(limit, priority, entry[CHUNKS + 2 * priority - 2])), 1, ID) end
    end
    return {#entry[LEASED] / ID, #entry[OFFERED] / (ID + 1), entry[WAITING], math.max(next_start(entry), 0),
      hold_of(entry), limits_of(entry)[AT_A_TIME], math.ceil(pace), burst}, id
  end

  -- The task left the shard without telling of its leases.
  local function forget(limit, id)
    while lease_ended(limit, id) do end
    pass(limit, id)
  end

  local function most_waiting(bytes, high_bytes, live, most_live)
    return (2 * bytes >= high_bytes or 2 * live >= most_live) and MOST_IF_HALF_FULL or MOST
  end

  -- Whether tasks of the key wait in SQL. Most shards have no such key.
  local any_crowded, crowded_keys = nil, {}
  local function is_crowded(limit)
    if any_crowded == nil then any_crowded = redis.call('EXISTS', CROWDED) == 1 end
    if crowded_keys[limit] == nil then
      crowded_keys[limit] = any_crowded and redis.call('ZSCORE', CROWDED, limit) and true or false
    end
    return crowded_keys[limit]
  end
  -- Tasks of the key wait in SQL, or will in a moment.
  local function set_crowded(limit)
    any_crowded, crowded_keys[limit] = true, true
    touch(limit)
  end
  -- Whether the task at this place of the call has to wait in SQL: enough of its key wait here, or others wait in SQL that
  -- it would overtake. One that comes from there overtakes none.
  local crowded_places = {}
  local function crowds(limit, place, most, is_from_sql)
    if entry_of(limit)[WAITING] < most and (is_from_sql or not is_crowded(limit)) then return false end
    set_crowded(limit)
    crowded_places[#crowded_places + 1] = place
    return true
  end

  -- Releases what may start, and writes. Returns when time alone lets a key of the call go on (ms), or nil; and the
  -- lanes that got elements.
  local function settle()
    if queue_text then redis.call('HSET', LIMITS, '', queue_text) end
    if is_walk_due then redis.call('HSET', COUNTERS, 'limits_walk', '0') end
    local entry_args, gone, start_args, crowded_args, soonest = {}, {}, {}, {}, nil
    local function wake_at(limit, at)
      start_args[#start_args + 1], start_args[#start_args + 2] = at, limit
      -- An own burst may let a time be farther away than the limits of the queue do.
      if at - now > longest_pace(of_queue()[PACE], of_queue()[BURST]) then
        longest_report = math.max(longest_report, at - now)
      end
      if not soonest or at < soonest then soonest = at end
    end
    for i = 1, #touched do
      local limit = touched[i]
      local entry = entries[limit]
      release(limit, entry)
      if is_crowded(limit) then
        crowded_args[#crowded_args + 1], crowded_args[#crowded_args + 2] = entry[WAITING], limit
      end
      local is_idle = entry[WAITING] == 0 and entry[LEASED] == '' and entry[OFFERED] == ''
      if is_idle and entry[NEXT] <= now and entry[HOLD] <= now and entry[ASKED_UNTIL] <= now then
        gone[#gone + 1] = limit
      else
        entry_args[#entry_args + 1], entry_args[#entry_args + 2] = limit, cmsgpack.pack(entry)
        local at = is_idle and math.max(entry[NEXT], entry[HOLD], entry[ASKED_UNTIL])
          or entry[WAITING] > 0 and next_start(entry) or 0
        if at > now then
          wake_at(limit, at)
        elseif entry[WAITING] > 0 and stale_left <= 0 then
          wake_at(limit, now)
        end
      end
    end
    local chunk_args, empty = {}, {}
    for i = 1, #changed_chunks do
      local field = changed_chunks[i]
      if chunks[field] == '' then
        empty[#empty + 1] = field
      else
        chunk_args[#chunk_args + 1], chunk_args[#chunk_args + 2] = field, chunks[field]
      end
    end
    local function call_all(command, key, args)
      for from = 1, #args, 6000 do redis.call(command, key, unpack(args, from, math.min(from + 5999, #args))) end
    end
    call_all('HSET', LIMITS, entry_args)
    call_all('HDEL', LIMITS, gone)
    call_all('HSET', LINES, chunk_args)
    call_all('HDEL', LINES, empty)
    call_all('ZADD', STARTS, start_args)
    call_all('ZADD', CROWDED, crowded_args)
    for lane, list in pairs(elements) do call_all('LPUSH', KEYS[LANES + 3 * lane], list) end
    if longest_report > 0 and longest_report > tonumber(redis.call('HGET', COUNTERS, 'longest_report') or 0) then
      redis.call('HSET', COUNTERS, 'longest_report', string.format('%.0f', longest_report))
    end
    if behind ~= 0 then redis.call('HINCRBY', COUNTERS, 'behind', behind) end
    if released > 0 and of_queue()[CHANNEL] ~= '' then redis.call('PUBLISH', of_queue()[CHANNEL], of_queue()[QUEUE]) end
    return soonest, elements
  end

  return {now = now, set_queue = set_queue, longest_wait = longest_wait, touch = touch, may_start = may_start, enter = enter,
    start = start, lease_ended = lease_ended, report = report, pass = pass, stands = stands, show = show, count_waiting = count_waiting,
    forget = forget, set_own = set_own, tell = tell, settle = settle, leases = leases, sleeps = sleeps,
    most_waiting = most_waiting, set_crowded = set_crowded, crowds = crowds, crowded_places = crowded_places}
end
local made_limits
local function limits()
  made_limits = made_limits or make_limits()
  return made_limits
end
local function settle_limits()
  if made_limits then return made_limits.settle() end
end
