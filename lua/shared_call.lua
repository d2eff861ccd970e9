-- A call of a shared session: it wants more tasks, surrenders, says what it has started, or only
-- shows that it lives.
--
-- ARGV[4] how many more tasks it wants, or '' to set the demand to 0   ARGV[5] the most of a session
-- ARGV[6] the most of a worker, in all sessions and processes
-- ARGV[7] how often the demand had been set to 0 when the session began to want these tasks, or ''
--         if it begins now
-- ARGV[8…] ids of started tasks
-- Returns {} if there is no such session, else
--   {how much was granted or surrendered, demand, tasks in hand, plan, 1 if streams of the worker may hold more back,
--    how often the demand was set to 0}
local s = alive()
if not s then return {} end
for a = 8, #ARGV do
  local value = redis.call('HGET', HELD, ARGV[a])
  if value then redis.call('HSET', HELD, ARGV[a], '2' .. string.sub(value, 2)) end
end
recount(s)
local by, wanted, streams = 0, tonumber(ARGV[4]), 0
-- If the session has surrendered since then, it does not want these tasks any more.
if ARGV[7] ~= '' and tonumber(ARGV[7]) ~= s[SURRENDERS] then wanted = 0 end
if not wanted then
  by = s[DEMAND]
  surrender(s)
elseif wanted > 0 then
  local beside = 0
  local all = redis.call('HGETALL', SESSIONS)
  for i = 1, #all, 2 do
    local name = all[i]
    if string.sub(name, 1, 1) == 'p' then
      -- A process that died has no streams.
      local lives = tonumber(redis.call('ZSCORE', PROCESSES, string.sub(name, 2)) or 0)
      if lives > now then streams = streams + tonumber(all[i + 1]) end
    elseif name ~= session then
      local other = cmsgpack.unpack(all[i + 1])
      beside = beside + other[DEMAND]
      -- A silent session does not drop leases that are over, so count its tasks in hand only until
      -- the last of their leases ends.
      if other[LATEST] > now then beside = beside + other[IN_HAND] end
    end
  end
  local own = s[DEMAND] + s[IN_HAND]
  local able = math.max(0, math.min(wanted, tonumber(ARGV[5]) - own))
  by = math.max(0, math.min(able, tonumber(ARGV[6]) - own - beside - streams))
  s[DEMAND] = s[DEMAND] + by
  if by == able then streams = 0 end
end
write(s)
return {by, s[DEMAND], s[IN_HAND], s[PLAN], streams > 0 and 1 or 0, s[SURRENDERS]}
