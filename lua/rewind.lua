-- Forgets how far the shard has read `pipeline`. This is needed if Kafka assigns offsets a second
-- time, because the topic was created again or the partition lost its end. The records still keep a
-- task from being enqueued twice.
--
-- ARGV[2] epoch of the partition's owner
-- Returns 1 forgotten | 0 the partition has another owner: nothing was changed
if tonumber(ARGV[2]) < tonumber(redis.call('HGET', COUNTERS, 'epoch') or 0) then return 0 end
redis.call('DEL', OFFSET)
return 1
