//! The flags of commands that call taskd: the token that they show, and the certificates that they trust.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use clap::Args;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
pub(super) use taskd_client::Token;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// The token of the caller, and the certificates of both sides.
#[derive(Args, Clone, Default)]
pub(super) struct Trust {
    /// Access token, if taskd asks for one; better in the variable TASKD_TOKEN, which other users do not see
    #[arg(long, env = "TASKD_TOKEN", hide_env = true, value_name = "TOKEN")]
    token: Option<Token>,

    /// Authority of the certificate of an https:// address [default: the authorities of the system]
    #[arg(long, env = "TASKD_TLS_CA", hide_env = true, value_name = "PEM")]
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
        Self { token: Some(token), ..Self::default() }
    }
}

impl Trust {
    pub(super) fn token(&self) -> Token {
        self.token.clone().unwrap_or_default()
    }

    pub(super) fn over_grpc(&self) -> anyhow::Result<ClientTlsConfig> {
        let mut tls = ClientTlsConfig::new();
        tls = match &self.tls_ca {
            Some(file) => tls.ca_certificate(Certificate::from_pem(read(file)?)),
            None => tls.with_native_roots(),
        };
        if let (Some(cert), Some(key)) = (&self.client_cert, &self.client_key) {
            tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        Ok(tls)
    }

    pub(super) fn over_http(&self) -> anyhow::Result<Arc<ClientConfig>> {
        let mut roots = RootCertStore::empty();
        match &self.tls_ca {
            Some(file) => {
                for authority in certificates(file)? {
                    roots.add(authority).with_context(|| format!("{} is no authority", file.display()))?;
                }
            }
            None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
        }
        let config = ClientConfig::builder().with_root_certificates(roots);
        let config = match (&self.client_cert, &self.client_key) {
            (Some(cert), Some(key)) => {
                let key = PrivateKeyDer::from_pem_slice(&read(key)?)
                    .with_context(|| format!("{} has no private key in PEM", key.display()))?;
                config.with_client_auth_cert(certificates(cert)?, key).context("--client-cert is of no use")?
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
    let certificates = CertificateDer::pem_slice_iter(&read(file)?).collect::<Result<_, _>>();
    certificates.with_context(|| format!("{} has no certificate in PEM", file.display()))
}

/// The words of taskd, and the way to give a command a token.
pub(super) fn with_hint(said: &str, is_unauthenticated: bool) -> String {
    match is_unauthenticated {
        true => format!("{said}; give the command one with --token or TASKD_TOKEN"),
        false => said.to_owned(),
    }
}
