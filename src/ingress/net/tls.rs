//! TLS of both ports. The certificate is read again when its files change, and is then used for new
//! connections.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::RwLock;
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject as _},
    },
    server::WebPkiClientVerifier,
};
use tokio_rustls::TlsAcceptor;
use x509_parser::{parse_x509_certificate, time::ASN1Time};

use crate::{
    config::TlsFiles,
    model::Protocol,
    runtime::{LoopError, Supervisor},
    telemetry::metrics,
};

/// How often taskd checks whether the files have changed.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The files cannot be used. The message names the setting, the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{setting} = {file:?} cannot be read: {error}")]
    Unreadable {
        setting: &'static str,
        file: PathBuf,
        error: std::io::Error,
    },
    #[error("{setting} = {file:?} has no {what} in PEM: {}", in_words(.error))]
    NotPem {
        setting: &'static str,
        file: PathBuf,
        what: &'static str,
        error: pem::Error,
    },
    #[error("tls_cert_file = {file:?} expired at {at}; renew the certificate")]
    Expired { file: PathBuf, at: String },
    #[error("tls_cert_file = {file:?} and tls_key_file do not go together: {error}")]
    NotAPair { file: PathBuf, error: rustls::Error },
    #[error("tls_client_ca_file = {file:?} has no authority that taskd can use: {error}")]
    NoAuthority { file: PathBuf, error: String },
}

/// Begins encrypted connections. Cheap to clone.
#[derive(Clone)]
pub struct Tls {
    settings: Arc<TlsFiles>,
    loaded: Arc<RwLock<Loaded>>,
}

struct Loaded {
    files: Files,
    http: TlsAcceptor,
    grpc: TlsAcceptor,
    /// When the certificate expires, in Unix time.
    expires: Option<i64>,
}

/// The files have changed, and cannot be used now.
#[derive(Debug, thiserror::Error)]
#[error("{0}; the certificate of before stays in use")]
struct Kept(#[source] TlsError);

impl LoopError for Kept {}

fn in_words(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { end_marker: label } => {
            format!(
                "the line -----END {}----- is missing",
                String::from_utf8_lossy(label)
            )
        }
        pem::Error::IllegalSectionStart { line } => {
            format!(
                "the line {:?} begins no section",
                String::from_utf8_lossy(line)
            )
        }
        other => other.to_string(),
    }
}

/// The contents of the files.
#[derive(PartialEq)]
struct Files {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Tls {
    /// Reads the files. Returns `None` if the settings name none.
    pub fn load(settings: &TlsFiles) -> Result<Option<Self>, TlsError> {
        let Some(files) = Files::read(settings)? else {
            return Ok(None);
        };
        let loaded = Loaded::new(files, settings)?;
        loaded.report();
        Ok(Some(Self {
            settings: Arc::new(settings.clone()),
            loaded: Arc::new(RwLock::new(loaded)),
        }))
    }

    /// Reads the files again whenever they change, until the stop. taskd keeps using the old ones
    /// while the new ones cannot be used: a certificate may arrive before its key.
    pub fn keep_on(&self, supervisor: &Supervisor) {
        supervisor.spawn_loop("certificate", self.clone(), |tls, cx| async move {
            cx.every(LOOK_EVERY, || async { tls.look().map_err(Kept) })
                .await
        });
    }

    fn look(&self) -> Result<(), TlsError> {
        let Some(files) = Files::read(&self.settings)? else {
            return Ok(());
        };
        if files != self.loaded.read().files {
            let loaded = Loaded::new(files, &self.settings)?;
            loaded.report();
            *self.loaded.write() = loaded;
            tracing::info!("the certificate has changed: new connections get the new one");
        }
        Ok(())
    }

    pub(in crate::ingress) fn acceptor(&self, protocol: Protocol) -> TlsAcceptor {
        let loaded = self.loaded.read();
        match protocol {
            Protocol::Http => loaded.http.clone(),
            Protocol::Grpc => loaded.grpc.clone(),
        }
    }
}

impl Files {
    fn read(settings: &TlsFiles) -> Result<Option<Self>, TlsError> {
        let (Some(cert), Some(key)) = (&settings.cert_file, &settings.key_file) else {
            return Ok(None);
        };
        let client_ca = settings
            .client_ca_file
            .as_deref()
            .map(|file| read("tls_client_ca_file", file))
            .transpose()?;
        Ok(Some(Self {
            cert: read("tls_cert_file", cert)?,
            key: read("tls_key_file", key)?,
            client_ca,
        }))
    }
}

fn read(setting: &'static str, file: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(file).map_err(|error| TlsError::Unreadable {
        setting,
        file: file.to_owned(),
        error,
    })
}

impl Loaded {
    fn report(&self) {
        if let Some(expires) = self.expires {
            metrics::certificate_expires(expires);
        }
    }

    fn new(files: Files, settings: &TlsFiles) -> Result<Self, TlsError> {
        let name = |file: &Option<PathBuf>| file.clone().unwrap_or_default();
        let not_pem = |setting, file: &Option<PathBuf>, what, error| {
            let file = name(file);
            TlsError::NotPem {
                setting,
                file,
                what,
                error,
            }
        };
        let certificates =
            |pem: &[u8]| CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
        let chain = certificates(&files.cert).and_then(|chain| {
            if chain.is_empty() {
                Err(pem::Error::NoItemsFound)
            } else {
                Ok(chain)
            }
        });
        let chain = chain
            .map_err(|error| not_pem("tls_cert_file", &settings.cert_file, "certificate", error))?;
        let key = PrivateKeyDer::from_pem_slice(&files.key)
            .map_err(|error| not_pem("tls_key_file", &settings.key_file, "private key", error))?;
        let expires = check_time(&chain[0], settings)?;
        let builder = match &files.client_ca {
            None => ServerConfig::builder().with_no_client_auth(),
            Some(pem) => {
                let no_authority = |error: String| TlsError::NoAuthority {
                    file: name(&settings.client_ca_file),
                    error,
                };
                let mut roots = RootCertStore::empty();
                for authority in
                    certificates(pem).map_err(|error| no_authority(error.to_string()))?
                {
                    roots
                        .add(authority)
                        .map_err(|error| no_authority(error.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build();
                ServerConfig::builder().with_client_cert_verifier(
                    verifier.map_err(|error| no_authority(error.to_string()))?,
                )
            }
        };
        let config = builder
            .with_single_cert(chain, key)
            .map_err(|error| TlsError::NotAPair {
                file: name(&settings.cert_file),
                error,
            })?;
        let acceptor = |protocol: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols = vec![protocol.to_vec()];
            TlsAcceptor::from(Arc::new(config))
        };
        Ok(Self {
            http: acceptor(b"http/1.1"),
            grpc: acceptor(b"h2"),
            expires,
            files,
        })
    }
}

/// Refuses a certificate that has expired, as every client would. Returns when it will expire, in
/// Unix time.
fn check_time(
    certificate: &CertificateDer<'_>,
    settings: &TlsFiles,
) -> Result<Option<i64>, TlsError> {
    // A certificate that cannot be parsed here is left to rustls.
    let Ok((_, parsed)) = parse_x509_certificate(certificate) else {
        return Ok(None);
    };
    let end = parsed.validity().not_after;
    if end < ASN1Time::now() {
        return Err(TlsError::Expired {
            file: settings.cert_file.clone().unwrap_or_default(),
            at: end.to_string(),
        });
    }
    Ok(Some(end.timestamp()))
}
