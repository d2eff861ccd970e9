//! The quick tests: everything that needs no more than a redis-server and SQLite.

// A test awaits what it spawns, or ends with it.
#![allow(clippy::disallowed_methods)]

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

#[path = "../columns/mod.rs"]
mod columns;

mod acts_anywhere;
mod architecture;
mod bench;
mod books;
mod broken_streams;
mod bulk;
mod bus_redis_streams;
mod changes;
mod column;
mod coordination;
mod dead_letters;
mod decoders;
mod discoveries;
mod discovery_insert;
mod discovery_results;
mod dist;
mod docs;
mod embedded;
mod event_topic;
mod events;
mod explain;
mod failing_shards;
mod fanout;
mod feeds;
mod filter;
mod filter_bits;
mod final_statuses;
mod forwarder;
mod fsck;
mod full_memory;
mod habits;
mod idle;
mod idle_streams;
mod ingress_cli;
mod ingress_delivery;
mod ingress_door;
mod ingress_grpc;
mod ingress_http;
mod ingress_limits;
mod limits;
mod load;
mod looks;
mod lua_bus_state;
mod lua_state;
mod moved_time;
mod next_tasks;
mod openapi;
mod outages;
mod own_limits;
mod partitions;
mod payload_schema;
mod printed;
mod queue_property;
mod rebuild;
mod redis_scripts;
mod retention;
mod riding;
mod self_healing;
mod sequences;
mod shared_random;
mod shared_sessions;
mod shortcut;
mod silent_connections;
mod slow_redis;
mod spent;
mod starts;
mod stderr;
mod store_sqlite;
mod strangers;
mod streams;
mod streams_random;
mod subscriptions;
mod subscriptions_property;
mod tasks_service;
mod tls;
mod top;
mod topics;
mod topics_made_late;
mod topologies;
mod traces;
mod trees;
mod ui;
mod weights;
mod work;
mod work_streams;
mod workers_come_and_go;
mod workflow_calls;
mod workflow_check;
mod workflow_ends;
mod workflows;
