//! The queue in Redis.
