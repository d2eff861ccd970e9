//! A proxy that can cut or delay the connections to a server; it listens on loopback.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    sync::watch,
    task::JoinHandle,
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mode {
    Pass,
    /// Delays all data by this much in each direction.
    Slow(Duration),
    /// Connections stay open and new ones are accepted, but nothing is forwarded; what was sent
    /// meanwhile arrives afterwards.
    Stall,
    /// Cuts existing connections; accepts new ones, never answers on them, and finally cuts them.
    Drop,
    /// Cuts existing connections, and cuts new ones immediately.
    Refuse,
}

#[derive(Clone, Debug)]
pub(crate) enum Upstream {
    Tcp(String),
    Unix(PathBuf),
}

/// A running proxy. Dropping it stops it and closes its connections.
pub(crate) struct Proxy {
    port: u16,
    mode: watch::Sender<Mode>,
    /// Connections with numbers up to this one are silent.
    silent: watch::Sender<u64>,
    /// The number of the next connection.
    next: Arc<AtomicU64>,
    upstream: Arc<Mutex<Option<Upstream>>>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy that leads to no server yet.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, watched) = watch::channel(Mode::Pass);
        let (silent, heard) = watch::channel(0);
        let (next, upstream) = (
            Arc::new(AtomicU64::new(1)),
            Arc::<Mutex<Option<Upstream>>>::default(),
        );
        let state = State {
            mode: watched,
            silent: heard,
        };
        let accepting = tokio::spawn(accept(
            listener,
            state,
            Arc::clone(&next),
            Arc::clone(&upstream),
        ));
        Self {
            port,
            mode,
            silent,
            next,
            upstream,
            accepting,
        }
    }

    pub(crate) fn lead_to(&self, upstream: Upstream) {
        *self.upstream.lock().unwrap() = Some(upstream);
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// How many connections there have been so far.
    pub(crate) fn connections(&self) -> u64 {
        self.next.load(Ordering::SeqCst) - 1
    }

    /// Silences all current connections forever: they stay open, and TCP acknowledges data, but
    /// nothing is forwarded. Later ones work. Returns how many connections there have been.
    pub(crate) fn silence(&self) -> u64 {
        let last = self.connections();
        self.silence_up_to(last);
        last
    }

    /// Like [`Self::silence`], for the connections with numbers up to this one. The first is number
    /// 1.
    pub(crate) fn silence_up_to(&self, last: u64) {
        self.silent.send_replace(last);
    }
}

/// The state shared by all connections.
#[derive(Clone)]
struct State {
    mode: watch::Receiver<Mode>,
    silent: watch::Receiver<u64>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        // Its connections notice that the sender was dropped.
    }
}

async fn accept(
    listener: TcpListener,
    state: State,
    next: Arc<AtomicU64>,
    upstream: Arc<Mutex<Option<Upstream>>>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        let upstream = upstream.lock().unwrap().clone();
        if let Some(upstream) = upstream {
            let number = next.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(connection(stream, number, upstream, state.clone()));
        }
    }
}

async fn connection(stream: TcpStream, number: u64, upstream: Upstream, mut state: State) {
    stream.set_nodelay(true).ok();
    // In mode `Drop`, hold the connection without contacting the server until the mode changes.
    let now = *state.mode.borrow_and_update();
    match now {
        Mode::Drop => {
            state.mode.changed().await.ok();
            return;
        }
        Mode::Refuse => return,
        Mode::Pass | Mode::Slow(_) | Mode::Stall => {}
    }
    match upstream {
        Upstream::Tcp(address) => {
            if let Ok(server) = TcpStream::connect(address).await {
                server.set_nodelay(true).ok();
                pass(stream.into_split(), server.into_split(), number, state).await;
            }
        }
        Upstream::Unix(path) => {
            if let Ok(server) = UnixStream::connect(path).await {
                pass(stream.into_split(), server.into_split(), number, state).await;
            }
        }
    }
}

/// Forwards in both directions until either side ends or the connection is cut.
async fn pass(
    client: (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    server: (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    number: u64,
    state: State,
) {
    let cut = async {
        let mut mode = state.mode.clone();
        mode.wait_for(|mode| matches!(mode, Mode::Drop | Mode::Refuse))
            .await
            .ok();
    };
    tokio::select! {
        () = one_way(client.0, server.1, number, state.clone()) => {}
        () = one_way(server.0, client.1, number, state.clone()) => {}
        () = cut => {}
    }
}

async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    number: u64,
    State { mut mode, silent }: State,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(count) = from.read(&mut buffer).await else {
            return;
        };
        // Read and discard the data, and everything that follows.
        if count > 0 && number <= *silent.borrow() {
            continue;
        }
        let open = mode.wait_for(|mode| *mode != Mode::Stall).await.is_ok();
        let now = *mode.borrow();
        if let Mode::Slow(later) = now {
            tokio::time::sleep(later).await;
        }
        if count == 0 || !open || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
