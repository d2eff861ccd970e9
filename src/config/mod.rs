//! The settings of a process, with all defaults filled in and all values checked.
//!
//! [`load`] collects them from flags, environment and file, `check` checks them, and [`to_toml`]
//! prints them.

mod calls;
mod check;
mod check_queue;
mod enrich;
mod error;
mod events;
#[cfg(test)]
mod fuzz;
mod idle;
mod load;
mod options;
mod origins;
mod otel;
mod properties;
mod schema;
mod settings;
mod show;
mod traces;
mod units;
mod urls;
mod wording;
mod written;

pub use self::{
    calls::{CallHosts, CallOverrides, CallSecrets, Calls},
    check::MOST_PARTITIONS,
    enrich::{Enrich, EnrichUrl, SecretHeader},
    error::Error,
    events::EventQueues,
    idle::without_effect,
    load::{Loaded, load},
    options::Options,
    origins::{Origin, Origins},
    properties::{Properties, Rules},
    schema::NamedSchema,
    settings::{
        Auth, Dashboard, Dedup, Discovery, Fanout, Limits, LogFormat, Pipeline, QueueSettings,
        Queues, RedisAccess, Settings, TlsFiles, Watchdog, Workflows,
    },
    show::to_toml,
    traces::{OtlpHeaders, OtlpProtocol, TraceDiscovered, Traces},
    units::{ByteSize, Time},
    urls::{BusUrl, DatabaseUrl, RedisUrl, without_password},
    wording::in_field,
};
