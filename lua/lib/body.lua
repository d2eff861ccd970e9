
-- The weight of bodies. A body begins with its head: priority (1 byte), max_attempts (4), lease in ms (4). If the task
-- has a limit key, the field for it follows: its tag LIMIT, its length (a varint of one or two bytes), the first 8 bytes
-- of the key's hash, and the key. If it has a backoff of its own, the field for that follows: its tag OWN, its length,
-- and 18 bytes.

-- The weight of an open task is the size of its body plus this: about what its record, element and
-- lease take.
local OVERHEAD = 400

-- A larger body than LARGE has its head again in the field id .. 'h', so that a script reads some
-- bytes instead of a megabyte.
local LARGE, HEAD, OWN, OWN_BYTES, LIMIT = 1024, 9, 122, 20, 114
