//! A way to a server that can be cut: a listener on loopback that passes on what comes, or not.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
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
    /// Connections stay and are taken, and nothing goes through: what was sent meanwhile arrives afterwards.
    Stall,
    /// Connections are cut; new ones are taken, hang without an answer and are cut in the end.
    Drop,
    /// Connections are cut, new ones at once.
    Refuse,
}

#[derive(Clone, Debug)]
pub(crate) enum Upstream {
    Tcp(String),
    Unix(PathBuf),
}

/// Ends, with its connections, when dropped.
pub(crate) struct Proxy {
    port: u16,
    mode: watch::Sender<Mode>,
    upstream: Arc<Mutex<Option<Upstream>>>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Leads nowhere yet.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, watched) = watch::channel(Mode::Pass);
        let upstream = Arc::<Mutex<Option<Upstream>>>::default();
        let accepting = tokio::spawn(accept(listener, watched, Arc::clone(&upstream)));
        Self { port, mode, upstream, accepting }
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
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        // Its connections see that the sender is gone.
    }
}

async fn accept(listener: TcpListener, mode: watch::Receiver<Mode>, upstream: Arc<Mutex<Option<Upstream>>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let upstream = upstream.lock().unwrap().clone();
        if let Some(upstream) = upstream {
            tokio::spawn(connection(stream, upstream, mode.clone()));
        }
    }
}

async fn connection(stream: TcpStream, upstream: Upstream, mut mode: watch::Receiver<Mode>) {
    stream.set_nodelay(true).ok();
    // A connection that hangs: nobody is asked, until the mode changes.
    let now = *mode.borrow_and_update();
    match now {
        Mode::Drop => {
            mode.changed().await.ok();
            return;
        }
        Mode::Refuse => return,
        Mode::Pass | Mode::Stall => {}
    }
    match upstream {
        Upstream::Tcp(address) => {
            if let Ok(server) = TcpStream::connect(address).await {
                server.set_nodelay(true).ok();
                pass(stream.into_split(), server.into_split(), mode).await;
            }
        }
        Upstream::Unix(path) => {
            if let Ok(server) = UnixStream::connect(path).await {
                pass(stream.into_split(), server.into_split(), mode).await;
            }
        }
    }
}

/// Both ways, until one ends or the way is cut.
async fn pass(
    client: (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    server: (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    mode: watch::Receiver<Mode>,
) {
    let cut = async {
        let mut mode = mode.clone();
        mode.wait_for(|mode| matches!(mode, Mode::Drop | Mode::Refuse)).await.ok();
    };
    tokio::select! {
        () = one_way(client.0, server.1, mode.clone()) => {}
        () = one_way(server.0, client.1, mode.clone()) => {}
        () = cut => {}
    }
}

async fn one_way(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, mut mode: watch::Receiver<Mode>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(count) = from.read(&mut buffer).await else { return };
        let open = mode.wait_for(|mode| *mode != Mode::Stall).await.is_ok();
        if count == 0 || !open || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
