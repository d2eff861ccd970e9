//! The flags that secure calls to taskd: the access token to send, and the certificates to trust
//! and to present.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use rustls::{
    CertificateError, ClientConfig, InvalidMessage, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
pub(super) use taskd_client::Token;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::config::without_password;

/// The token of the caller, and the certificates of both sides.
#[derive(Args, Clone, Default)]
pub(super) struct Trust {
    /// Access token, if taskd asks for one; better in the variable TASKD_TOKEN, which other users
    /// do not see
    #[arg(long, env = "TASKD_TOKEN", hide_env = true, value_name = "TOKEN")]
    token: Option<Token>,

    /// Authority of the certificate of an https:// address [default: the authorities of the system]
    #[arg(long, env = "TASKD_TLS_CA", hide_env_values = true, value_name = "PEM")]
    tls_ca: Option<PathBuf>,

    /// Certificate of this client, if taskd asks for one
    #[arg(long, value_name = "PEM", requires = "client_key")]
    client_cert: Option<PathBuf>,

    /// The key of that certificate
    #[arg(long, value_name = "PEM", requires = "client_cert")]
    client_key: Option<PathBuf>,
}

impl From<Token> for Trust {
    fn from(token: Token) -> Self {
        Self {
            token: Some(token),
            ..Self::default()
        }
    }
}

impl Trust {
    pub(super) fn token(&self) -> Token {
        self.token.clone().unwrap_or_default()
    }

    /// Refuses certificates for an address without TLS: they would have no effect, and the token
    /// would be sent in clear text.
    pub(super) fn suits(&self, urls: &str) -> anyhow::Result<()> {
        let flag = match (&self.tls_ca, &self.client_cert) {
            (Some(file), _)
                if std::env::var_os("TASKD_TLS_CA")
                    .is_some_and(|given| file == Path::new(&given)) =>
            {
                "TASKD_TLS_CA"
            }
            (Some(_), _) => "--tls-ca",
            (None, Some(_)) => "--client-cert",
            (None, None) => return Ok(()),
        };
        match urls.split(',').find_map(|url| url.strip_prefix("http://")) {
            Some(host) => bail!(
                "{flag} needs an https:// address; write https://{}",
                without_password(host)
            ),
            None => Ok(()),
        }
    }

    /// Says why TLS with the server at `url` failed. Returns `None` if the error is not about TLS.
    pub(super) fn failure(
        &self,
        url: &str,
        error: &(dyn std::error::Error + 'static),
    ) -> Option<String> {
        let host = url.trim_start_matches("https://");
        let error = tls_error(error)?;
        let why = match error {
            // The second one means that another authority has the same name.
            rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            ) => {
                let trusted = self
                    .tls_ca
                    .as_ref()
                    .map(|file| format!("not that of {}", file.display()));
                let trusted = trusted.as_deref().unwrap_or("not trusted here");
                format!(
                    "the certificate of {host}: its authority is {trusted}; name it with --tls-ca"
                )
            }
            rustls::Error::InvalidCertificate(CertificateError::Other(why))
                if is_authority(why) =>
            {
                format!(
                    "the certificate of {host} is that of an authority (CA:TRUE); make one with \
                     basicConstraints=CA:FALSE"
                )
            }
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
                let instead = if self.tls_ca.is_some() {
                    ", without --tls-ca"
                } else {
                    ""
                };
                format!("{host} speaks no TLS; write http://{host}{instead}")
            }
            other => format!("no TLS connection with {url}: {other}"),
        };
        Some(why)
    }

    pub(super) fn over_grpc(&self) -> anyhow::Result<ClientTlsConfig> {
        let mut tls = ClientTlsConfig::new();
        tls = match &self.tls_ca {
            Some(file) => {
                certificates(file)?;
                tls.ca_certificate(Certificate::from_pem(read(file)?))
            }
            None => tls.with_native_roots(),
        };
        if let (Some(cert), Some(key)) = (&self.client_cert, &self.client_key) {
            certificates(cert)?;
            tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        Ok(tls)
    }

    pub(super) fn over_http(&self) -> anyhow::Result<Arc<ClientConfig>> {
        let mut roots = RootCertStore::empty();
        match &self.tls_ca {
            Some(file) => {
                for authority in certificates(file)? {
                    roots
                        .add(authority)
                        .with_context(|| format!("{} is no authority", file.display()))?;
                }
            }
            None => drop(
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs),
            ),
        }
        let config = ClientConfig::builder().with_root_certificates(roots);
        let config = match (&self.client_cert, &self.client_key) {
            (Some(cert), Some(key)) => {
                let key = PrivateKeyDer::from_pem_slice(&read(key)?)
                    .with_context(|| format!("{} has no private key in PEM", key.display()))?;
                config
                    .with_client_auth_cert(certificates(cert)?, key)
                    .context("--client-cert is of no use")?
            }
            _ => config.with_no_client_auth(),
        };
        Ok(Arc::new(config))
    }
}

fn read(file: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

fn certificates(file: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let none = || format!("{} has no certificate in PEM", file.display());
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&read(file)?)
        .collect::<Result<_, _>>()
        .with_context(none)?;
    ensure!(!certificates.is_empty(), none());
    Ok(certificates)
}

/// Returns true for `webpki::Error::CaUsedAsEndEntity`. It is recognised by its text, because taskd
/// does not depend on that crate itself.
fn is_authority(why: &rustls::OtherError) -> bool {
    why.0.to_string() == "CaUsedAsEndEntity"
}

/// Finds the error of rustls in a chain of errors. `source` skips an error that is wrapped in an
/// [`io::Error`], so look into those.
fn tls_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a rustls::Error> {
    let mut chain = std::iter::successors(Some(error), |error| error.source());
    chain.find_map(|error| {
        let inner = error
            .downcast_ref::<io::Error>()
            .and_then(|error| error.get_ref()?.downcast_ref());
        inner.or_else(|| error.downcast_ref())
    })
}

/// Adds to taskd's message how to give the command a token, if the call was not authenticated.
pub(super) fn with_hint(said: &str, is_unauthenticated: bool) -> String {
    match is_unauthenticated {
        true => format!("{said}; give the command one with --token or TASKD_TOKEN"),
        false => said.to_owned(),
    }
}
