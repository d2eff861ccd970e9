//! The filter of keys seen before: a hint, SQL decides.
