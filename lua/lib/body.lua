
-- The weight of bodies. A body begins with its head: priority (1 byte), max_attempts (4), lease in ms (4). If the task
-- has a backoff of its own, the field for it follows: its tag OWN, its length, and 18 bytes.

-- An open task weighs its body and this: about what its record, element and lease take.
local OVERHEAD = 400

-- The field id .. 'h' has the head of a larger body again, so that a script reads some bytes instead of a megabyte.
local LARGE, HEAD, OWN, OWN_BYTES = 1024, 9, 122, 20
