//! Asks the database and the bus each second whether they answer. The memory guard asks Redis.

use std::sync::Arc;

use crate::{
    bus::Bus,
    model::in_short,
    runtime::{LOOK_EVERY, Loop, Server, Servers, Supervisor},
    store::Store,
};

/// Starts the two loops.
pub(super) fn watch(
    store: &Arc<dyn Store>,
    bus: &Arc<dyn Bus>,
    servers: &Servers,
    supervisor: &Supervisor,
) {
    supervisor.spawn_loop(
        "database",
        (Arc::clone(store), servers.clone()),
        watch_database,
    );
    supervisor.spawn_loop("bus", (Arc::clone(bus), servers.clone()), watch_bus);
}

async fn watch_database((store, servers): (Arc<dyn Store>, Servers), cx: Loop) {
    loop {
        match cx.stop.run_until_cancelled(store.ping()).await {
            None => return,
            Some(Ok(())) => servers.note_answer(Server::Database),
            Some(Err(error)) => servers.note_silence(Server::Database, in_short(&error)),
        }
        cx.beat();
        if !cx.pause(LOOK_EVERY).await {
            return;
        }
    }
}

async fn watch_bus((bus, servers): (Arc<dyn Bus>, Servers), cx: Loop) {
    loop {
        let Some(Some(answer)) = cx.stop.run_until_cancelled(bus.ping()).await else {
            return;
        };
        match answer {
            Ok(()) => servers.note_answer(Server::Bus),
            Err(error) => servers.note_silence(Server::Bus, in_short(&error)),
        }
        cx.beat();
        if !cx.pause(LOOK_EVERY).await {
            return;
        }
    }
}
