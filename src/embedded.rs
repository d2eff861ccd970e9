//! The embedded default: a real redis-server of our own.
