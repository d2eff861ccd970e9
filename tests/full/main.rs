//! The tests that need more than redis-server and SQLite: other servers, or processes that are
//! killed.

// A test awaits what it spawns, or ends with it.
#![allow(clippy::disallowed_methods)]

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

#[path = "../columns/mod.rs"]
mod columns;

mod api;
mod bus_kafka;
mod column;
mod crawl;
mod dead_letters;
mod event_topic;
mod events;
mod flushall;
mod history;
mod joins;
mod kafka_daemon;
mod kafka_fanout;
mod kafka_groups;
mod kafka_secured;
mod kafka_topics;
mod kafka_transactions;
mod lifecycle;
mod limits;
mod migrations;
mod openapi;
mod outages;
mod partitions;
mod pressure;
mod processes;
mod queues;
mod recovery;
mod redis_access;
mod redis_cluster;
mod redis_wait;
mod retention;
mod scale;
mod search;
mod sessions;
mod shared_sessions;
mod silent_servers;
mod store_mysql;
mod store_server;
mod subscriptions;
mod traces;
mod unicode_data;
mod workflows;
