//! The address in a URL of Redis: one server, or some nodes of a cluster.

use std::{path::Path, time::Duration};

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    RedisError, TlsCertificates,
    aio::{MultiplexedConnection, PubSub},
    cluster::{ClusterClient, ClusterClientBuilder},
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};

use super::error::Error;
use crate::config::{RedisAccess, without_password};

/// How long connecting may take.
pub(super) const CONNECT: Duration = Duration::from_secs(5);
/// The same for each node of a cluster; connecting to the cluster tries all of them.
const CONNECT_NODE: Duration = Duration::from_secs(1);
/// How long a call waits for its answer. A call that times out may have been executed.
pub(super) const RESPONSE: Duration = Duration::from_secs(10);
/// The schemes of clusters, with those of their nodes. The rest of the URL is as for one server,
/// but may have several hosts, separated by commas.
const CLUSTER: [(&str, &str); 2] = [
    ("redis+cluster://", "redis://"),
    ("rediss+cluster://", "rediss://"),
];
/// The most retries of a call to a cluster, including redirections and waits for a restarting node.
/// [`RESPONSE`] limits all of them together.
const RETRIES: u32 = 8;
const RETRY_WAIT_MS: (u64, u64) = (20, 500);

/// After this time of silence the kernel probes a connection, and then repeats the probe at this
/// interval.
const PROBE_AFTER: Duration = Duration::from_secs(5);
/// The kernel closes a connection whose peer has acknowledged nothing for this long.
const GONE_AFTER: Duration = Duration::from_secs(15);

/// Servers, and what is needed to talk to them.
#[derive(Clone)]
pub(super) struct Address {
    /// One server, or the nodes of a cluster that the URL names.
    nodes: Vec<ConnectionInfo>,
    pub(super) is_cluster: bool,
    certificates: Option<TlsCertificates>,
}

impl Address {
    pub(super) fn new(url: &str, access: &RedisAccess) -> Result<Self, Error> {
        let refuse = |source| Error::Url {
            url: without_password(url),
            source,
        };
        let cluster = CLUSTER
            .iter()
            .find_map(|(scheme, plain)| Some((*plain, url.strip_prefix(scheme)?)));
        let urls = match cluster {
            None => vec![url.to_owned()],
            Some((plain, rest)) => urls_of_nodes(plain, rest),
        };
        let info = |url: &String| {
            let info = url.as_str().into_connection_info().map_err(refuse);
            info.map(|info| info.set_tcp_settings(tcp_settings()))
        };
        let nodes: Vec<_> = urls.iter().map(info).collect::<Result<_, _>>()?;
        let address = Self {
            nodes,
            is_cluster: cluster.is_some(),
            certificates: certificates(access)?,
        };
        // A broken certificate fails here, before anything waits for a server.
        address
            .seeds()
            .try_for_each(|info| address.client(info).map(drop))
            .map_err(refuse)?;
        if address
            .seeds()
            .any(|info| matches!(info.addr(), ConnectionAddr::TcpTls { insecure: true, .. }))
        {
            return Err(refuse(
                (
                    ErrorKind::InvalidClientConfig,
                    "taskd checks certificates: leave out #insecure",
                )
                    .into(),
            ));
        }
        Ok(address)
    }

    /// The servers that the URL names.
    pub(super) fn seeds(&self) -> impl Iterator<Item = &ConnectionInfo> {
        self.nodes.iter()
    }

    /// The first of them.
    pub(super) fn seed(&self) -> &ConnectionInfo {
        self.nodes.first().expect("a URL names at least one server")
    }

    /// Returns the address of another node of the cluster. An empty `host` means the host of the
    /// URL.
    pub(super) fn node(&self, host: &str, port: u16) -> ConnectionInfo {
        let seed = self.seed();
        let address = match seed.addr() {
            ConnectionAddr::TcpTls {
                host: known,
                insecure,
                ..
            } => ConnectionAddr::TcpTls {
                host: if host.is_empty() { known } else { host }.to_owned(),
                port,
                insecure: *insecure,
                tls_params: None,
            },
            ConnectionAddr::Tcp(known, _) => {
                ConnectionAddr::Tcp(if host.is_empty() { known } else { host }.to_owned(), port)
            }
            other => other.clone(),
        };
        seed.clone().set_addr(address)
    }

    pub(super) fn client(&self, info: &ConnectionInfo) -> redis::RedisResult<Client> {
        match &self.certificates {
            Some(certificates) => Client::build_with_tls(info.clone(), certificates.clone()),
            None => Client::open(info.clone()),
        }
    }

    pub(super) fn cluster(&self) -> redis::RedisResult<ClusterClient> {
        let builder = ClusterClientBuilder::new(self.nodes.clone())
            .connection_timeout(CONNECT_NODE)
            .response_timeout(RESPONSE)
            .tcp_settings(tcp_settings())
            .retries(RETRIES)
            .min_retry_wait(RETRY_WAIT_MS.0)
            .max_retry_wait(RETRY_WAIT_MS.1);
        match &self.certificates {
            Some(certificates) => builder.certs(certificates.clone()).build(),
            None => builder.build(),
        }
    }

    /// Connects to this server. `response` limits how long each answer may take.
    pub(super) async fn connect(
        &self,
        info: &ConnectionInfo,
        response: Option<Duration>,
    ) -> redis::RedisResult<MultiplexedConnection> {
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT))
            .set_response_timeout(response);
        self.client(info)?
            .get_multiplexed_async_connection_with_config(&config)
            .await
    }

    pub(super) async fn pubsub(&self, info: &ConnectionInfo) -> redis::RedisResult<PubSub> {
        let client = self.client(info)?;
        tokio::time::timeout(CONNECT, client.get_async_pubsub())
            .await
            .unwrap_or_else(|_| Err(timed_out()))
    }
}

/// Settings that make the kernel notice a vanished peer, also on connections that only listen.
fn tcp_settings() -> TcpSettings {
    let probes = TcpKeepalive::new()
        .with_time(PROBE_AFTER)
        .with_interval(PROBE_AFTER);
    TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(probes)
        .set_user_timeout(GONE_AFTER)
}

pub(super) fn timed_out() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

/// Splits `user:password@a:1,b:2/` into one URL per host.
fn urls_of_nodes(scheme: &str, rest: &str) -> Vec<String> {
    let (credentials, hosts) = match rest.rsplit_once('@') {
        Some((credentials, hosts)) => (format!("{credentials}@"), hosts),
        None => (String::new(), rest),
    };
    hosts
        .trim_end_matches('/')
        .split(',')
        .map(|host| format!("{scheme}{credentials}{host}"))
        .collect()
}

fn certificates(access: &RedisAccess) -> Result<Option<TlsCertificates>, Error> {
    let read = |setting, path: &Path| {
        std::fs::read(path).map_err(|source| Error::File {
            setting,
            path: path.to_owned(),
            source,
        })
    };
    let root_cert = access
        .ca_file
        .as_deref()
        .map(|path| read("redis_ca_file", path))
        .transpose()?;
    let client_tls = match (&access.cert_file, &access.key_file) {
        (Some(cert), Some(key)) => Some(ClientTlsConfig {
            client_cert: read("redis_cert_file", cert)?,
            client_key: read("redis_key_file", key)?,
        }),
        _ => None,
    };
    let any = root_cert.is_some() || client_tls.is_some();
    Ok(any.then_some(TlsCertificates {
        client_tls,
        root_cert,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(url: &str) -> Vec<String> {
        let address = Address::new(url, &RedisAccess::default()).unwrap();
        address
            .seeds()
            .map(|info| {
                format!(
                    "{}@{}",
                    info.redis_settings().password().unwrap_or("-"),
                    info.addr()
                )
            })
            .collect()
    }

    #[test]
    fn a_cluster_is_named_by_some_of_its_nodes() {
        assert_eq!(nodes("redis://h:1"), ["-@h:1"]);
        assert_eq!(
            nodes("redis+cluster://a:1,b:2,c"),
            ["-@a:1", "-@b:2", "-@c:6379"]
        );
        assert_eq!(
            nodes("redis+cluster://u:p%2Fq@a:1,[::1]:2/"),
            ["p/q@a:1", "p/q@::1:2"]
        );
        let address = Address::new("rediss+cluster://u:p@a:1", &RedisAccess::default()).unwrap();
        let node = address.node("b", 2);
        assert!(
            matches!(node.addr(), ConnectionAddr::TcpTls { host, port: 2, insecure: false, .. } if host == "b")
        );
        assert_eq!(node.redis_settings().username(), Some("u"));
    }

    #[test]
    fn a_url_that_names_nothing_is_refused_without_its_password() {
        for url in [
            "redis+cluster://u:secret@",
            "redis+cluster://u:secret@a:1,:2",
            "redis+cluster://u:secret@a:x",
            "rediss://u:secret@h/#insecure",
        ] {
            let error = Address::new(url, &RedisAccess::default())
                .err()
                .expect(url)
                .to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
