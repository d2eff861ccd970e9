-- Removes a shared session whose leases have ended.
redis.call('DEL', HELD, ENDS)
redis.call('ZREM', DUE, member)
redis.call('HDEL', SESSIONS, session)
return 1
