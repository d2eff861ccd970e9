-- Reads the names and numbers on which all processes must agree. Writes each one that is missing.
--
-- KEYS[1] -> <p>:{bus}:generation   string: a random name of this generation of the topics
-- KEYS[2] -> <p>:{bus}:partitions   hash: topic -> how many partitions it was begun with
-- ARGV[1] the name if there is none yet
-- then per topic: its name, and how many partitions it gets if it has none yet
-- Returns {generation, partitions of the first topic, …}
redis.call('SET', KEYS[1], ARGV[1], 'NX')
local answer = {redis.call('GET', KEYS[1])}
for a = 2, #ARGV, 2 do
  redis.call('HSETNX', KEYS[2], ARGV[a], ARGV[a + 1])
  answer[#answer + 1] = redis.call('HGET', KEYS[2], ARGV[a])
end
return answer
