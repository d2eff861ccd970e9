
-- Returns the length of the head of a body with the field of the limit key, and the first 8 bytes
-- of the hash of that key, or nil if there is none.
local function limited_head(body)
  if string.byte(body, HEAD + 1) ~= LIMIT then return HEAD end
  local length, from = string.byte(body, HEAD + 2) or 0, HEAD + 3
  if length > 127 then length, from = length - 128 + 128 * (string.byte(body, HEAD + 3) or 0), HEAD + 4 end
  local limit = string.sub(body, from, from + 7)
  if length < 8 or #limit < 8 then return HEAD end
  return from + length - 1, limit
end
-- Returns the length of the part of a body that scripts read: its head and the fields of the limit
-- key and the backoff.
local function head_length(body)
  local length = limited_head(body)
  return string.byte(body, length + 1) == OWN and length + OWN_BYTES or length
end
