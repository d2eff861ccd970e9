//! The client: the servers of an installation, a token, certificates, and inserts.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use backon::{BackoffBuilder as _, ExponentialBuilder};
use prost::Message as _;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::{
    address::Servers,
    error::Error,
    new_task::NewTask,
    pb::{self, discovery_client::DiscoveryClient},
    token::Token,
};

/// The timeout of a call, in addition to the time for which it asked taskd to wait.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The delays between retries.
pub(crate) const WAITS: ExponentialBuilder = ExponentialBuilder::new()
    .with_jitter()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(Duration::from_secs(2))
    .without_max_times();
/// The limits of one insert call: tasks and bytes.
const INSERT_TASKS: usize = 500;
const INSERT_BYTES: usize = 2 << 20;

/// A taskd installation, with one address or several. Clones share the connections.
#[derive(Clone)]
pub struct Client {
    servers: Arc<Servers>,
    give_up_after: Duration,
}

/// The options of a [`Client`].
#[derive(Clone)]
pub struct ClientBuilder {
    addresses: Vec<String>,
    token: Token,
    tls: Option<ClientTlsConfig>,
    authority: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
    give_up_after: Duration,
}

/// taskd's answer to one new task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// The id of the task; empty for a rejected one.
    pub id: String,
    /// The outcome.
    pub status: InsertedAs,
    /// Why the task was rejected, or how the earlier task with its key ended.
    pub note: String,
    /// The tree that the task is in, if the insert named one. That of a duplicate is the one that
    /// had it first. Otherwise empty.
    pub tree: String,
}

/// The outcome of the insert of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsertedAs {
    /// taskd stored the task.
    Created,
    /// taskd already had a task with this key.
    Duplicate,
    /// The task is invalid; inserting it again would fail again.
    Rejected,
}

impl Client {
    /// Creates a client of the taskd at `address`, without a token. It connects with its first
    /// call.
    pub fn new(address: impl Into<String>) -> Result<Self, Error> {
        Self::builder([address]).build()
    }

    /// Creates a client of the taskd processes at `addresses`: if one is unavailable, it calls the
    /// next.
    pub fn builder(addresses: impl IntoIterator<Item = impl Into<String>>) -> ClientBuilder {
        ClientBuilder {
            addresses: addresses.into_iter().map(Into::into).collect(),
            token: Token::default(),
            tls: None,
            authority: None,
            identity: None,
            give_up_after: Duration::from_secs(60),
        }
    }

    /// Inserts tasks, in calls of up to 500. The answers are in the order of the tasks.
    ///
    /// While taskd is unavailable or full, the insert keeps retrying; it fails after
    /// [`ClientBuilder::give_up_after`] without any progress. After an error, some of the tasks may
    /// be stored; inserting all of them again creates no task twice.
    pub async fn insert(
        &self,
        tasks: impl IntoIterator<Item = NewTask>,
    ) -> Result<Vec<Inserted>, Error> {
        let mut inserted = Vec::new();
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for NewTask(task) in tasks {
            let more = task.encoded_len();
            if !batch.is_empty() && (batch.len() == INSERT_TASKS || bytes + more > INSERT_BYTES) {
                inserted.extend(self.insert_batch(std::mem::take(&mut batch)).await?);
                bytes = 0;
            }
            bytes += more;
            batch.push(task);
        }
        if !batch.is_empty() {
            inserted.extend(self.insert_batch(batch).await?);
        }
        Ok(inserted)
    }

    async fn insert_batch(&self, tasks: Vec<pb::NewTask>) -> Result<Vec<Inserted>, Error> {
        let mut inserted: Vec<Option<Inserted>> = vec![None; tasks.len()];
        // The tasks without an answer yet, with their positions.
        let mut rest: Vec<(usize, pb::NewTask)> = tasks.into_iter().enumerate().collect();
        let (mut waits, mut since) = (WAITS.build(), Instant::now());
        loop {
            let request = pb::InsertTasksRequest {
                tasks: rest.iter().map(|(_, task)| task.clone()).collect(),
                ..Default::default()
            };
            let insert =
                |taskd| async move { DiscoveryClient::new(taskd).insert_tasks(request).await };
            let error = match self.servers.call(CALL_TIMEOUT, insert).await {
                Ok(answer) => {
                    let before = rest.len();
                    let mut results = answer.results.into_iter();
                    rest.retain(|(place, _)| {
                        inserted[*place] = results.next().and_then(Inserted::read);
                        inserted[*place].is_none()
                    });
                    if rest.len() < before {
                        (waits, since) = (WAITS.build(), Instant::now());
                    }
                    let address = self.servers.current().to_owned();
                    Error::Away {
                        address,
                        message: "it asks to try later".to_owned(),
                    }
                }
                Err(error) if error.is_of_items() => {
                    let (places, tasks): (Vec<usize>, Vec<_>) = rest.into_iter().unzip();
                    for (place, one) in places
                        .into_iter()
                        .zip(self.insert_apart(tasks, &error).await?)
                    {
                        inserted[place] = Some(one);
                    }
                    return Ok(inserted.into_iter().flatten().collect());
                }
                Err(error) => error,
            };
            if rest.is_empty() {
                return Ok(inserted.into_iter().flatten().collect());
            }
            if !error.may_pass() || since.elapsed() >= self.give_up_after {
                return Err(error);
            }
            tokio::time::sleep(waits.next().unwrap_or_default()).await;
        }
    }

    /// Inserts tasks that taskd refused together, because they are too large for one call or one of
    /// them is invalid: each half on its own.
    async fn insert_apart(
        &self,
        mut tasks: Vec<pb::NewTask>,
        error: &Error,
    ) -> Result<Vec<Inserted>, Error> {
        if tasks.len() == 1 {
            return Ok(vec![Inserted {
                id: String::new(),
                status: InsertedAs::Rejected,
                note: error.to_string(),
                tree: String::new(),
            }]);
        }
        let others = tasks.split_off(tasks.len() / 2);
        let mut inserted = Box::pin(self.insert_batch(tasks)).await?;
        inserted.extend(Box::pin(self.insert_batch(others)).await?);
        Ok(inserted)
    }

    pub(crate) fn give_up_after(&self) -> Duration {
        self.give_up_after
    }

    pub(crate) fn servers(&self) -> &Servers {
        &self.servers
    }
}

impl Inserted {
    /// Returns `None` if taskd asks to try again later.
    fn read(result: pb::InsertResult) -> Option<Self> {
        let status = match result.status() {
            pb::InsertStatus::Created => InsertedAs::Created,
            pb::InsertStatus::Duplicate => InsertedAs::Duplicate,
            pb::InsertStatus::Rejected => InsertedAs::Rejected,
            pb::InsertStatus::TryLater | pb::InsertStatus::Unspecified => return None,
        };
        Some(Self {
            id: result.id,
            status,
            note: result.error,
            tree: result.tree,
        })
    }
}

impl ClientBuilder {
    /// The access token, if taskd requires one.
    #[must_use]
    pub fn token(self, token: Token) -> Self {
        Self { token, ..self }
    }

    /// The certificate authority for `https://` addresses, in PEM, instead of the system's.
    #[must_use]
    pub fn authority(self, pem: impl Into<Vec<u8>>) -> Self {
        Self {
            authority: Some(pem.into()),
            ..self
        }
    }

    /// The certificate of this client and its key, in PEM, if taskd requires one.
    #[must_use]
    pub fn identity(self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        Self {
            identity: Some((certificate.into(), key.into())),
            ..self
        }
    }

    /// A complete TLS configuration, instead of [`Self::authority`] and [`Self::identity`].
    #[must_use]
    pub fn tls(self, tls: ClientTlsConfig) -> Self {
        Self {
            tls: Some(tls),
            ..self
        }
    }

    /// How long an insert, or another call, goes on while taskd takes nothing. By default a minute. A worker never
    /// gives up.
    #[must_use]
    pub fn give_up_after(self, give_up_after: Duration) -> Self {
        Self {
            give_up_after,
            ..self
        }
    }

    /// Fails if an address or a certificate is invalid.
    pub fn build(self) -> Result<Client, Error> {
        let tls = self.tls.unwrap_or_else(|| {
            let tls = match self.authority {
                Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
                None => ClientTlsConfig::new().with_native_roots(),
            };
            match self.identity {
                Some((certificate, key)) => tls.identity(Identity::from_pem(certificate, key)),
                None => tls,
            }
        });
        let servers = Arc::new(Servers::new(&self.addresses, &self.token, &tls)?);
        Ok(Client {
            servers,
            give_up_after: self.give_up_after,
        })
    }
}
