//! Fanout: topic `pipeline` into the queue.
