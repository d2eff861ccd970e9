
-- Limits per key. A limited task stands in a lane only while its limit key may start it; the others wait *behind their
-- key*, in a line per priority. All tasks of a limit key are in one shard, so one script sees all of it.
--
-- LIMITS has an entry per limit key that has something, by the first 8 bytes of the key's hash, and under '' the limits
-- of the queue, as enqueue and claim got them last. The own limits of a key, which an operator set, stand under its
-- hash and 'o', those of all keys under 'o*'; 'o' has the version of own limits that the shard knows, and how many keys
-- have some. LINES has the lines, in chunks of up to 64 items, and long holds that SQL does not have yet. STARTS says
-- when time alone lets a key go on, or its entry may go. CROWDED has the keys of which tasks wait in SQL, because
-- enough of the key wait here, each with how many do.
--
-- Nothing of this costs a call that meets no limited task: limits() makes the functions once one is met, and
-- settle_limits() does at the end of a script, when records and bodies are written, what follows from all of it.
-- Outside of make_limits(): a function is made faster the fewer locals of the function around it it uses.
local sub, byte, char, find = string.sub, string.byte, string.char, string.find
-- An entry: ids of leased replicas, priority and id of each offered task, earliest next start (ms), end of the hold
-- (ms), items in the lines, releases so far, then the first and the last chunk of each priority's line, the time between
-- two starts that a worker asked for (ms), and until when that holds (ms). It is stored as msgpack, or, as with most
-- keys, if it has nothing but leased or nothing but offered tasks, as 'l' and the former or 'o' and the latter.
local LEASED, OFFERED, NEXT, HOLD, WAITING, TURN, CHUNKS, ASKED, ASKED_UNTIL = 1, 2, 3, 4, 5, 6, 7, 13, 14
-- The limits of a queue: at a time (0 MOST_LEASED), ms between starts (0 none), burst, jitter (percent), whether the time
-- counts from the end of a lease, wake channel, queue.
local AT_A_TIME, PACE, BURST, JITTER, FROM_END, CHANNEL, QUEUE = 1, 2, 3, 4, 5, 6, 7
-- Own limits: at a time (-1 as the queue, 0 nothing starts), ms between starts (-1 as the queue), burst (0 as the
-- queue), end of the hold (ms).
local OWN_AT_A_TIME, OWN_PACE, OWN_BURST, OWN_HOLD = 1, 2, 3, 4
local ID, CHUNK_ITEMS, ITEM = 16, 64, 24
-- A list of an entry that has so many bytes is changed by one cut and one join, at the end of the call.
local LONG_LIST = 1024
-- So many of a key are leased at most, whatever its limits say: each is in its entry. A call looks at so many items that
-- count no more.
local MOST_LEASED, STALE_AT_ONCE = 1000, 1000
-- So many of a key are offered at most, whatever may start: the entry is read and written whole.
local MOST_OFFERED, ENOUGH_OFFERED = 128, 64
-- So many items of a key wait here at most; in a shard that is half full, in bytes or live tasks, so many.
local MOST, MOST_IF_HALF_FULL = 4096, 64
-- How long a report may hold a key, and how long the time between two starts counts that it asks for (ms).
local LONGEST_REPORT = 3600000
-- SQL keeps holds of workers that are this long (ms), so that they outlive Redis. Until it has them, LINES does: those
-- of so many calls at most.
local LONG_HOLD, MOST_UNKEPT = 10000, 1000
local LANES = #KEYS - 20

local function make_limits()
  -- include lib/clock.lua
  local queue, stored_text, queue_text, is_walk_due, ends_holds = nil, nil, nil, false, false
  -- Own limits of all keys; how many keys have own limits; and of entries that are subject to any, what counts for them.
  local own_of_all, keys_with_own, merged = nil, 0, {}
  local function limits_in(text)
    local limits = cmsgpack.unpack(text)
    if limits[AT_A_TIME] == 0 then limits[AT_A_TIME] = MOST_LEASED end
    return limits
  end
  local function of_queue()
    if not queue then
      local found = redis.call('HMGET', LIMITS, '', 'o', 'o*')
      stored_text = found[1]
      queue = stored_text and limits_in(stored_text) or {MOST_LEASED, 0, 1, 0, 0, '', ''}
      if found[2] then keys_with_own = cmsgpack.unpack(found[2])[2] end
      own_of_all = found[3] and cmsgpack.unpack(found[3])
    end
    return queue
  end
  -- The limits as the caller has them, which are those of the shard from now on; '': the settings of the caller have
  -- none, so those of the shard stay. Returns whether they are new: then all keys have to look at their times again. So
  -- while processes have different settings, those of the shard change once a second at most.
  local function set_queue(text)
    if text == '' then return false end
    of_queue()
    if stored_text == text then return false end
    queue = limits_in(text)
    local changed_at = stored_text and tonumber(redis.call('HGET', COUNTERS, 'limits_changed') or 0) or 0
    if changed_at <= now and now - changed_at < 1000 then return false end
    queue_text, is_walk_due = text, stored_text and true
    return is_walk_due
  end

  -- Entries and chunks are read once a call, and written once.
  local entries, touched, chunks, changed_chunks = {}, {}, {}, {}
  local behind, stale_left = 0, STALE_AT_ONCE

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

  -- The longest that a time of an entry may be away (ms). A time farther away was written before the clock was set back.
  local function longest_pace(pace, burst)
    return math.ceil((burst + 1) * pace * (1 + of_queue()[JITTER] / 100)) + 1
  end

  -- When the first replica of a key may start (ms, 0 at once). A shard in a later generation may be one that Redis lost,
  -- with the starts of its keys: nothing starts in the first interval after its first limited task came.
  local function first_start(limits)
    if tonumber(generation) <= 1 or limits[PACE] == 0 then return 0 end
    local since = tonumber(redis.call('HGET', COUNTERS, 'limited') or now)
    local burst = limits[BURST]
    return since + (burst > 1 and 2 or 1) + burst * limits[PACE]
  end

  -- Reads the entries of the keys that the call is about to ask for, at once. A key may be there several times.
  local texts = {}
  local function read_all(keys)
    of_queue()
    local unknown = {}
    for i = 1, #keys do
      local limit = keys[i]
      if texts[limit] == nil and not entries[limit] then
        texts[limit] = false
        unknown[#unknown + 1] = limit
        if keys_with_own > 0 then unknown[#unknown + 1] = limit .. 'o' end
      end
    end
    for from = 1, #unknown, 6000 do
      local found = redis.call('HMGET', LIMITS, unpack(unknown, from, math.min(from + 5999, #unknown)))
      for i = 1, #found do texts[unknown[from + i - 1]] = found[i] end
    end
  end
  local function entry_of(limit)
    local entry = entries[limit]
    if entry then return entry end
    if texts[limit] == nil then read_all({limit}) end
    local limits, text, own = queue, texts[limit], keys_with_own > 0 and texts[limit .. 'o']
    if own then own = cmsgpack.unpack(own) end
    if own or own_of_all then limits = merge(own) end
    local form = text and byte(text)
    if form == 108 then
      entry = {sub(text, 2), '', 0, 0, 0, 0, 0, -1, 0, -1, 0, -1, 0, 0}
    elseif form == 111 then
      entry = {'', sub(text, 2), 0, 0, 0, 0, 0, -1, 0, -1, 0, -1, 0, 0}
    else
      local ok, stored = false, nil
      if text then ok, stored = pcall(cmsgpack.unpack, text) end
      entry = ok and type(stored) == 'table' and #stored == ASKED_UNTIL and stored
        or {'', '', first_start(limits), 0, 0, 0, 0, -1, 0, -1, 0, -1, 0, 0}
    end
    entries[limit] = entry
    if limits.is_own then merged[entry] = limits end
    if entry[NEXT] == 0 and entry[HOLD] == 0 and entry[ASKED_UNTIL] == 0 then return entry end
    -- A hold that came back from SQL, without the starts that Redis has lost.
    if entry[NEXT] < 0 then entry[NEXT] = first_start(limits) end
    entry[HOLD] = math.min(entry[HOLD], now + 1 + LONGEST_REPORT)
    entry[ASKED_UNTIL] = math.min(entry[ASKED_UNTIL], now + LONGEST_REPORT)
    local pace, burst = pace_of(entry)
    if entry[NEXT] > now + longest_pace(pace, burst) then entry[NEXT] = now + math.ceil(pace) end
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

  -- The place of an item in a text of items of one width that end with this text, other than the cut ones. In a long text
  -- look for the end of the id, which is random: its beginning is the same in all items.
  local function find_item(text, width, ending, is_cut)
    local tail, from = #text > LONG_LIST and sub(ending, -4) or ending, 1
    while true do
      local at = find(text, tail, from, true)
      if not at then return nil end
      local start = at + #tail - width
      if start % width == 1 and not (is_cut and is_cut[start])
        and (tail == ending or sub(text, start + width - #ending, start + width - 1) == ending) then return start end
      from = at + 1
    end
  end

  -- What this call takes out of the lists of an entry and adds to them. Each change would copy the whole text, which for
  -- a key with a thousand leases has 16 KB.
  local WIDTHS, edits = {[LEASED] = ID, [OFFERED] = ID + 1}, {[LEASED] = {}, [OFFERED] = {}}
  local function edit_of(entry, list)
    local edit = edits[list][entry]
    if not edit then
      edit = {cuts = {}, is_cut = {}, added = {}}
      edits[list][entry] = edit
    end
    return edit
  end
  local function items_in(entry, list)
    local edit, items = edits[list][entry], #entry[list] / WIDTHS[list]
    return edit and items - #edit.cuts + #edit.added or items
  end
  local function add_item(entry, list, item)
    if not edits[list][entry] and #entry[list] <= LONG_LIST then
      entry[list] = entry[list] .. item
      return
    end
    local added = edit_of(entry, list).added
    added[#added + 1] = item
  end
  local function remove_item(limit, list, id)
    local entry = entry_of(limit)
    local text, edit, width = entry[list], edits[list][entry], WIDTHS[list]
    if text == '' and not edit then return false end
    local start = find_item(text, width, id, edit and edit.is_cut)
    if start and not edit and #text <= LONG_LIST then
      entry[list] = #text == width and '' or sub(text, 1, start - 1) .. sub(text, start + width)
      touch(limit)
      return true
    end
    if start then
      edit = edit_of(entry, list)
      edit.is_cut[start] = true
      edit.cuts[#edit.cuts + 1] = start
      touch(limit)
      return true
    end
    local added = edit and edit.added or {}
    for i = 1, #added do
      if sub(added[i], -ID) == id then
        table.remove(added, i)
        touch(limit)
        return true
      end
    end
    return false
  end
  -- The text of a list, with the changes of this call.
  local function text_of(entry, list)
    local edit, text, width = edits[list][entry], entry[list], WIDTHS[list]
    if not edit then return text end
    local cuts, pieces, from = edit.cuts, {}, 1
    table.sort(cuts)
    for i = 1, #cuts do
      if cuts[i] > from then pieces[#pieces + 1] = sub(text, from, cuts[i] - 1) end
      from = cuts[i] + width
    end
    pieces[#pieces + 1] = sub(text, from)
    entry[list] = table.concat(pieces) .. table.concat(edit.added)
    edits[list][entry] = nil
    return entry[list]
  end

  -- How many replicas of the key may start now.
  local function room(entry)
    local limits = merged[entry] or queue
    local at_a_time = limits[AT_A_TIME]
    if entry[HOLD] > now or (limits.hold or 0) > now or at_a_time < 0 then return 0 end
    local free = at_a_time - items_in(entry, LEASED)
    if limits[PACE] <= 0 and entry[ASKED_UNTIL] <= now then return free > 0 and free or 0 end
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
    remove_item(limit, OFFERED, id)
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

  -- Takes the foremost items out of the first chunk of a line, at most so many; '': the line is empty.
  local function leave(limit, entry, priority, most)
    local first, last = CHUNKS + 2 * priority - 2, CHUNKS + 2 * priority - 1
    while entry[first] <= entry[last] do
      local field = field_of(limit, priority, entry[first])
      local text = chunk(field)
      local size = math.min(most * ITEM, #text)
      if size == #text then
        entry[first] = entry[first] + 1
        if entry[first] > entry[last] then entry[first], entry[last] = 0, -1 end
      end
      if size > 0 then
        set_chunk(field, sub(text, size + 1))
        entry[WAITING], behind = entry[WAITING] - size / ITEM, behind - size / ITEM
        return sub(text, 1, size)
      end
    end
    return ''
  end

  -- An element of lib/record.lua, of a limited task.
  local function element_of(num, offer, limit, id)
    if num < 128 and offer == 0 then return '\148' .. char(num) .. '\0\168' .. limit .. '\176' .. id end
    return cmsgpack.pack({num, offer, limit, id})
  end

  -- The functions for records are made only where a task is released: each costs every call that makes it.
  local function make_find()
    -- include lib/record.lua
    -- Of the items, the id, the offer and the element of each whose offer still counts. A task without a record has only
    -- a body.
    return function(limit, items)
      local ids, found = {}, {}
      for at = 1, #items, ITEM do ids[#ids + 1] = sub(items, at, at + ID - 1) end
      local records, bodies = redis.call('HMGET', RECORDS, unpack(ids)), nil
      for i = 1, #ids do
        local id, offer = ids[i], struct.unpack('>I8', items, i * ITEM - 7)
        if not records[i] then
          -- As in enqueue.lua: the bodies of all at once, if none is large.
          if not bodies then
            local is_cheap = #ids > 1 and tonumber(redis.call('HGET', COUNTERS, 'largest_body') or 0) <= LARGE
            bodies = is_cheap and redis.call('HMGET', BODIES, unpack(ids)) or {}
          end
          if offer == 0 and (bodies[i] or bodies[i] == nil and fresh(id)) then
            found[#found + 1] = {id, 0, element_of(1, 0, limit, id)}
          end
        else
          local t = load(records[i])
          if t and t.limit == limit and left(t) > 0 and (t[OFFER] or 0) == offer then
            found[#found + 1] = {id, offer, element_of(t[NUM], offer, limit, id)}
          end
        end
      end
      return found, #ids
    end
  end
  local find_offers

  -- Puts tasks into lanes, from the highest priority down, while those offered of this or a higher priority are fewer
  -- than what may start. One release in ten begins with the lowest priority, so that none starves.
  local elements, released = {}, 0
  local function put_into_lane(entry, id, offer, priority, new_element)
    local lane = 2 * priority - (offer > 0 and 1 or 0)
    local list = elements[lane]
    if not list then
      list = {}
      elements[lane] = list
    end
    list[#list + 1] = new_element
    add_item(entry, OFFERED, char(priority) .. id)
  end
  -- A new task stands in a lane at once if its key has room for it and nothing else waits there, as with most keys.
  local admitted = {}
  local function admit(limit, id, num, offer, priority)
    local entry = entry_of(limit)
    if entry[WAITING] > 0 or items_in(entry, OFFERED) >= math.min(room(entry), MOST_OFFERED) then
      enter(limit, id, offer, priority, false)
    else
      remove_item(limit, OFFERED, id)
      admitted[entry] = (admitted[entry] or 0) + 1
      put_into_lane(touch(limit), id, offer, priority, element_of(num, offer, limit, id))
    end
  end
  local function release(limit, entry)
    local free = math.min(room(entry), MOST_OFFERED)
    if free == 0 then return end
    local offered = {0, 0, 0}
    local text = text_of(entry, OFFERED)
    for at = 1, #text, ID + 1 do
      local priority = byte(text, at)
      offered[priority] = offered[priority] + 1
    end
    local before = released
    local function release_of(priority, ahead)
      -- While enough are offered, they are the next to go. So most calls release nothing, and one releases many.
      local wanted = ahead < math.min(free, ENOUGH_OFFERED) and free - ahead or 0
      while stale_left > 0 and wanted > 0 do
        local items = leave(limit, entry, priority, math.min(wanted, stale_left))
        if items == '' then return end
        find_offers = find_offers or make_find()
        local found, looked_at = find_offers(limit, items)
        for i = 1, #found do put_into_lane(entry, found[i][1], found[i][2], priority, found[i][3]) end
        offered[priority], released, wanted = offered[priority] + #found, released + #found, wanted - #found
        stale_left = stale_left - (looked_at - #found)
      end
    end
    if entry[TURN] == 9 then
      for priority = 3, 1, -1 do release_of(priority, offered[1] + offered[2] + offered[3]) end
    end
    if released == before then
      release_of(1, offered[1])
      release_of(2, offered[1] + offered[2])
      release_of(3, offered[1] + offered[2] + offered[3])
    end
    if released > before then entry[TURN] = (entry[TURN] + 1) % 10 end
  end

  -- A replica starts.
  local function start(limit, id)
    remove_item(limit, OFFERED, id)
    local entry, limits = touch(limit), of_queue()
    add_item(entry, LEASED, id)
    if limits_of(entry)[PACE] <= 0 and entry[ASKED_UNTIL] <= now then return end
    local wait = pace_of(entry)
    if wait > 0 then
      -- Redis's clock is cut to milliseconds: the start may be a millisecond later than `now`.
      if limits[JITTER] > 0 then
        math.randomseed((now + byte(id, 16) * 65536 + items_in(entry, LEASED)) % 2147483647)
        wait = wait * (1 + math.random() * limits[JITTER] / 100)
      end
      entry[NEXT] = math.ceil(math.max(entry[NEXT], now + 1) + wait)
    end
  end

  -- A lease is over. Returns whether there was one.
  local function lease_ended(limit, id)
    if not remove_item(limit, LEASED, id) then return false end
    local entry, limits = entry_of(limit), of_queue()
    local pace = limits[FROM_END] > 0 and pace_of(entry) or 0
    if pace > 0 then entry[NEXT] = math.max(entry[NEXT], math.ceil(now + 1 + pace)) end
    return true
  end

  -- A report of a worker: nothing of the key starts for this long, or starts are so far apart (ms). A worker only slows
  -- down.
  local long_holds = {}
  local function report(limit, hold, pace)
    local entry = touch(limit)
    if hold > 0 then entry[HOLD] = math.max(entry[HOLD], now + 1 + math.min(hold, LONGEST_REPORT)) end
    if hold >= LONG_HOLD then long_holds[limit] = entry[HOLD] end
    if pace > 0 then
      local before = entry[ASKED_UNTIL] > now and entry[ASKED] or 0
      entry[ASKED], entry[ASKED_UNTIL] = math.max(before, math.min(pace, LONGEST_REPORT)), now + LONGEST_REPORT
      if not limits_of(entry).is_own_pace then entry[NEXT] = math.max(entry[NEXT], now + 1 + entry[ASKED]) end
    end
  end

  -- A worker that may not have the task meets its element, or the task is over: it no longer takes its key's place.
  local function pass(limit, id) return remove_item(limit, OFFERED, id) end

  -- What there is to tell of a task that waits behind its key as this offer: how many are leased, how many may be (-1
  -- none), when time alone lets the next one start (ms), items before it (-1 more than `most`), whether own
  -- limits count (0|1); nil: it does not wait there.
  local function show(limit, id, offer, priority, most)
    local entry, item, before = entry_of(limit), id .. struct.pack('>I8', offer), 0
    local function shown(items)
      return {items_in(entry, LEASED), limits_of(entry)[AT_A_TIME], math.max(next_start(entry), 0), items,
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

  -- How many leases of each task the entry counts, and how often it counts each as offered.
  local function counted(limit)
    local counts = {[LEASED] = {}, [OFFERED] = {}}
    for list, of_list in pairs(counts) do
      local text = text_of(entry_of(limit), list)
      for to = WIDTHS[list], #text, WIDTHS[list] do
        local id = sub(text, to - ID + 1, to)
        of_list[id] = (of_list[id] or 0) + 1
      end
    end
    return counts[LEASED], counts[OFFERED]
  end
  -- Ends the hold that a worker asked for.
  local function unhold(limit)
    local entry = touch(limit)
    if entry[HOLD] > now then long_holds[limit] = 0 end
    entry[HOLD] = 0
  end
  -- Gives a key own limits, or none (nil); '': all keys. A new hold of an operator replaces that of a worker: for all keys
  -- it does so in the walk of promote over them.
  local function set_own(limit, own, replaces_hold)
    local field = limit == '' and 'o*' or limit .. 'o'
    -- From now on an entry is read with its own limits, also if these are the first ones of the shard.
    of_queue()
    keys_with_own = math.max(keys_with_own, 1)
    if own then redis.call('HSET', LIMITS, field, cmsgpack.pack(own)) else redis.call('HDEL', LIMITS, field) end
    if limit == '' then
      own_of_all, is_walk_due, ends_holds = own, true, ends_holds or replaces_hold
      return
    end
    -- Of an idle key there is nothing to release.
    if not entries[limit] and redis.call('HEXISTS', LIMITS, limit) == 0 then return end
    local entry = touch(limit)
    merged[entry] = (own or own_of_all) and merge(own) or nil
    if replaces_hold then unhold(limit) end
  end

  -- What there is to tell of a key: leased, offered, waiting, when the next may start (ms), end of the hold (ms), at a
  -- time (-1 nothing starts), ms between starts, burst, and a task of it, if there is one.
  local function tell(limit)
    local entry = entry_of(limit)
    local pace, burst = pace_of(entry)
    local id = sub(text_of(entry, LEASED), 1, ID)
    if id == '' then id = sub(text_of(entry, OFFERED), 2, ID + 1) end
    for priority = 1, 3 do
      if id == '' then id = sub(chunk(field_of(limit, priority, entry[CHUNKS + 2 * priority - 2])), 1, ID) end
    end
    return {items_in(entry, LEASED), items_in(entry, OFFERED), entry[WAITING], math.max(next_start(entry), 0),
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
    if not any_crowded then return false end
    if crowded_keys[limit] == nil then
      crowded_keys[limit] = redis.call('ZSCORE', CROWDED, limit) and true or false
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
    local entry = entry_of(limit)
    if entry[WAITING] + (admitted[entry] or 0) < most and (is_from_sql or not is_crowded(limit)) then return false end
    set_crowded(limit)
    crowded_places[#crowded_places + 1] = place
    return true
  end

  -- The long holds of calls that SQL does not have yet are texts in LINES: limit keys, each with the end of its hold
  -- (8 bytes), 0 if an operator ended it. holds.lua hands them out.
  local function keep_long_holds()
    local items = {}
    for limit, at in pairs(long_holds) do items[#items + 1] = limit .. struct.pack('>I8', at) end
    if #items == 0 then return end
    local found = redis.call('HMGET', COUNTERS, 'holds', 'holds_kept')
    local last = tonumber(found[1] or 0)
    if last - tonumber(found[2] or 0) >= MOST_UNKEPT then return end
    redis.call('HSET', COUNTERS, 'holds', last + 1)
    redis.call('HSET', LINES, string.format('holds %d', last + 1), table.concat(items))
  end

  -- Releases what may start, and writes. Returns in how many ms time alone lets a key of the call go on, or nil; and
  -- the lanes that got elements.
  local function settle()
    if queue_text then
      redis.call('HSET', LIMITS, '', queue_text)
      if stored_text then redis.call('HSET', COUNTERS, 'limits_changed', string.format('%.0f', now)) end
    end
    if is_walk_due then redis.call('HSET', COUNTERS, 'limits_walk', '0') end
    if ends_holds then redis.call('HSET', COUNTERS, 'limits_unhold', '1') end
    local entry_args, gone, start_args, crowded_args, soonest, latest = {}, {}, {}, {}, math.huge, now
    local function wake_at(limit, at)
      start_args[#start_args + 1], start_args[#start_args + 2] = at, limit
      soonest, latest = math.min(soonest, at), math.max(latest, at)
    end
    for i = 1, #touched do
      local limit = touched[i]
      local entry = entries[limit]
      if entry[WAITING] > 0 then release(limit, entry) end
      if is_crowded(limit) then
        crowded_args[#crowded_args + 1], crowded_args[#crowded_args + 2] = entry[WAITING], limit
      end
      local leased = edits[LEASED][entry] and text_of(entry, LEASED) or entry[LEASED]
      local offered = edits[OFFERED][entry] and text_of(entry, OFFERED) or entry[OFFERED]
      local is_idle = leased == '' and offered == '' and entry[WAITING] == 0
      local is_timeless = entry[NEXT] <= now and entry[HOLD] <= now and entry[ASKED_UNTIL] <= now
      if is_idle and is_timeless then
        gone[#gone + 1] = limit
      elseif is_timeless and entry[WAITING] == 0 and (offered == '' or leased == '') then
        local n = #entry_args
        entry_args[n + 1], entry_args[n + 2] = limit, offered == '' and 'l' .. leased or 'o' .. offered
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
    -- The farthest that any time in STARTS ever was away (ms).
    if latest > now and latest - now > tonumber(redis.call('HGET', COUNTERS, 'longest_start') or 0) then
      redis.call('HSET', COUNTERS, 'longest_start', string.format('%.0f', latest - now))
    end
    keep_long_holds()
    if behind ~= 0 then redis.call('HINCRBY', COUNTERS, 'behind', behind) end
    if released > 0 and of_queue()[CHANNEL] ~= '' then redis.call('PUBLISH', of_queue()[CHANNEL], of_queue()[QUEUE]) end
    return soonest < math.huge and math.max(soonest - now, 0) or nil, elements
  end

  return {now = now, set_queue = set_queue, read_all = read_all, touch = touch, may_start = may_start, enter = enter,
    admit = admit, start = start, lease_ended = lease_ended, report = report, pass = pass, show = show, forget = forget,
    set_own = set_own, unhold = unhold, tell = tell, settle = settle, counted = counted, most_waiting = most_waiting,
    set_crowded = set_crowded, crowds = crowds, crowded_places = crowded_places}
end
local made_limits
local function limits()
  made_limits = made_limits or make_limits()
  return made_limits
end
local function settle_limits()
  if made_limits then return made_limits.settle() end
end
