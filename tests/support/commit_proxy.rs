//! A proxy in front of a MySQL or MariaDB server. On request it drops the answer to a COMMIT: the
//! transaction took effect, but the client does not know that.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use url::Url;

pub(crate) struct CommitProxy {
    url: String,
    armed: Arc<AtomicBool>,
}

impl CommitProxy {
    /// Starts a proxy for the server of `url`, to which it connects without TLS.
    pub(crate) async fn start(url: &str) -> Self {
        let mut url = Url::parse(url).unwrap();
        let server = (url.host_str().unwrap().to_owned(), url.port().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        url.set_port(Some(listener.local_addr().unwrap().port()))
            .unwrap();
        url.set_query(Some("ssl-mode=DISABLED"));
        let armed = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&armed);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect((&*server.0, server.1)).await.unwrap();
                tokio::spawn(forward(client, server, Arc::clone(&cut)));
            }
        });
        Self {
            url: url.into(),
            armed,
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Drops the answer to the next COMMIT.
    pub(crate) fn cut_next_commit(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    /// True once the COMMIT has come.
    pub(crate) fn has_cut(&self) -> bool {
        !self.armed.load(Ordering::SeqCst)
    }
}

async fn forward(mut client: TcpStream, mut server: TcpStream, armed: Arc<AtomicBool>) {
    let (mut asked, mut answered) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let Ok(1..) = read else { return };
                let asked = &asked[..read.unwrap()];
                if server.write_all(asked).await.is_err() {
                    return;
                }
                // The length of the packet, its sequence number 0, the command "query", and the
                // text.
                if asked == b"\x07\0\0\0\x03COMMIT" && armed.swap(false, Ordering::SeqCst) {
                    assert!(server.read(&mut answered).await.unwrap() > 0);
                    return;
                }
            }
            read = server.read(&mut answered) => {
                let Ok(1..) = read else { return };
                if client.write_all(&answered[..read.unwrap()]).await.is_err() {
                    return;
                }
            }
        }
    }
}
