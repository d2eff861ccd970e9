-- Forgets how far the shard has read `pipeline`: the topic was made anew, or the end of the partition fell back, and offsets come a second
-- time. What has a record is still known by it.
--
-- ARGV[2] epoch of the partition's owner
-- Returns 1 forgotten | 0 the partition has another owner: nothing was changed
if tonumber(ARGV[2]) < tonumber(redis.call('HGET', META, 'epoch') or 0) then return 0 end
redis.call('DEL', OFFSET)
return 1
