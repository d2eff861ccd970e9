//! `taskd top`: the busiest queues of a running taskd and the latencies of its calls, on a whole
//! screen.

mod latency;
mod screen;
mod view;

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use clap::Args;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};

use self::{
    latency::Calls,
    screen::Screen,
    view::{Key, Seen, View},
};
use super::{address::Server, ask::get, http::HttpPort, named::AnyQueue, queues::QueuesSnapshot};
use crate::config::Time;

/// Watch the queues and the latencies of a running taskd on a whole terminal
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd top
  taskd top --server https://taskd.example:7600 --sort dead --every 5s

Keys: s sorts by the next column; p pauses and goes on; q ends. A token needs the role read; one \
that does not reach all queues sees its queues, without latencies. \
`taskd stats` writes the counts as JSON where there is no terminal.")]
pub struct Top {
    #[command(flatten)]
    queue: AnyQueue,

    /// The time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s")]
    every: Time,

    /// The column that the queues are sorted by
    #[arg(long, value_enum, default_value_t)]
    sort: Key,

    #[command(flatten)]
    server: Server,
}

async fn look(server: &HttpPort, queue: Option<&str>) -> anyhow::Result<Seen> {
    let (queues, metrics) = tokio::join!(get(server, "/v1/queues"), get(server, "/metrics"));
    let calls = metrics
        .map(|text| Calls::read(&String::from_utf8_lossy(&text)))
        .map_err(|error| error.to_string());
    let mut queues = QueuesSnapshot::read(server, &queues?)?;
    queues.keep(queue);
    Ok(Seen { queues, calls })
}

pub(super) async fn run(args: Top) -> anyhow::Result<()> {
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    ensure!(
        is_terminal,
        "top needs a terminal for its input and output; `taskd stats` writes JSON without one"
    );
    let server = args.server.port()?;
    let mut view = View::new(
        &server.url,
        args.every.0.max(Duration::from_millis(100)),
        args.sort,
    );
    // If the address or the token is wrong, fail with a message before opening the screen.
    view.see(look(&server, args.queue.name()).await?);
    let mut ends = [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
    ]
    .map(signal);
    let mut screen = Screen::open().context("cannot set up the terminal")?;
    let mut keys = screen::keys().context("cannot read the keys")?;
    let (pause, mut paused) = watch::channel(false);
    let (seen, mut looks) = mpsc::channel(1);
    let every = view.every;
    let looker = async {
        loop {
            tokio::time::sleep(every).await;
            // Neither of these can fail: `pause` and `looks` outlive this loop.
            paused.wait_for(|paused| !paused).await.ok();
            seen.send(look(&server, args.queue.name()).await).await.ok();
        }
    };
    tokio::pin!(looker);
    loop {
        // If the terminal is gone, end without an error.
        if screen
            .draw(|width, height| view.lines(width, height))
            .is_err()
        {
            return Ok(());
        }
        tokio::select! {
            key = keys.recv() => match key {
                Some(b's' | b'S') => view.sort_by_next(),
                Some(b'p' | b'P') => {
                    view.is_paused = !view.is_paused;
                    pause.send_replace(view.is_paused);
                }
                Some(b'q' | b'Q') | None => return Ok(()),
                Some(_) => {}
            },
            Some(seen) = looks.recv() => match seen {
                Ok(seen) => view.see(seen),
                Err(error) => view.fail(format!("{error:#}")),
            },
            () = screen::any(&mut ends) => return Ok(()),
            () = &mut looker => {}
        }
    }
}
