//! `enrich_…`: the endpoint that enriches the new tasks of a queue.

use std::{env, fs, time::Duration};

use hyper::header::{HeaderName, HeaderValue};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use url::Url;

/// The endpoint of a queue and how to call it.
#[derive(Clone, Debug, PartialEq)]
pub struct Enrich {
    pub url: Url,
    /// A header with a secret.
    pub header: Option<(HeaderName, HeaderValue)>,
    pub timeout: Duration,
    pub batch_tasks: usize,
    pub batch_bytes: usize,
    pub answer_bytes: usize,
    pub concurrency: usize,
    /// The number of failures in a row that open the circuit. Twice as many failures among four
    /// times as many calls open it, too.
    pub failures: u32,
    /// How long the circuit stays open.
    pub pause: Duration,
}

/// `https://host/path`, or `None` if the text is empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EnrichUrl(pub Option<Url>);

impl EnrichUrl {
    fn read(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        let url = Url::parse(text)
            .map_err(|error| format!("the URL is not one ({error}); write https://HOST/PATH"))?;
        if !["http", "https"].contains(&url.scheme()) || !url.has_host() {
            return Err(format!(
                "the URL has scheme {:?}; write https://HOST/PATH or http://…",
                url.scheme()
            ));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the URL contains a user or a password; use enrich_header".into());
        }
        Ok(Self(Some(url)))
    }
}

impl<'de> Deserialize<'de> for EnrichUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(String::deserialize(deserializer)?.trim()).map_err(de::Error::custom)
    }
}

impl Serialize for EnrichUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut url = self.0.clone();
        // The query may contain a secret.
        if let Some(url) = url.as_mut().filter(|url| url.query().is_some()) {
            url.set_query(Some("***"));
        }
        serializer.serialize_str(url.as_ref().map_or("", Url::as_str))
    }
}

/// Reads a line `Name: value` from `file:PATH` or `env:NAME`. Empty text means no header.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SecretHeader {
    written: String,
    pub(super) header: Option<(HeaderName, HeaderValue)>,
}

impl SecretHeader {
    fn read(written: &str) -> Result<Self, String> {
        let line = match written.split_once(':') {
            None if written.is_empty() => return Ok(Self::default()),
            Some(("file", path)) => {
                fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?
            }
            Some(("env", name)) => {
                env::var(name).map_err(|error| format!("the variable {name}: {error}"))?
            }
            // Do not echo the text, which may be the secret itself.
            _ => return Err("the header is not named; write file:PATH or env:NAME".into()),
        };
        let wrong = || format!("{written} does not hold one line \"Name: value\"");
        let (name, value) = line.trim().split_once(':').ok_or_else(wrong)?;
        let (Ok(name), Ok(mut value)) = (
            HeaderName::from_bytes(name.trim().as_bytes()),
            HeaderValue::from_str(value.trim()),
        ) else {
            return Err(wrong());
        };
        value.set_sensitive(true);
        Ok(Self {
            written: written.to_owned(),
            header: Some((name, value)),
        })
    }
}

impl<'de> Deserialize<'de> for SecretHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(String::deserialize(deserializer)?.trim()).map_err(de::Error::custom)
    }
}

impl Serialize for SecretHeader {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_web_address_without_secrets() {
        assert_eq!(EnrichUrl::read("").unwrap(), EnrichUrl(None));
        let url = EnrichUrl::read("https://h:1/enrich?key=secret").unwrap();
        assert_eq!(
            serde_json::to_string(&url).unwrap(),
            "\"https://h:1/enrich?***\""
        );
        for (url, want) in [
            ("h", "the URL is not one ("),
            (
                "ftp://h/",
                "the URL has scheme \"ftp\"; write https://HOST/PATH",
            ),
            (
                "https://u:secret@h/",
                "the URL contains a user or a password; use enrich_header",
            ),
        ] {
            let error = EnrichUrl::read(url).unwrap_err();
            assert!(error.contains(want) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_header_is_read_and_its_value_is_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("header");
        fs::write(&path, "Authorization: Bearer secret\n").unwrap();
        let written = format!("file:{}", path.display());
        let header = SecretHeader::read(&written).unwrap();
        assert_eq!(header.header.as_ref().unwrap().1, "Bearer secret");
        assert!(!format!("{header:?}").contains("secret"));
        for (text, want) in [
            (
                "Authorization: secret",
                "the header is not named; write file:PATH or env:NAME",
            ),
            ("file:/no/such", "cannot read /no/such: "),
            ("env:NO_SUCH_VARIABLE", "the variable NO_SUCH_VARIABLE: "),
        ] {
            let error = SecretHeader::read(text).unwrap_err();
            assert!(
                error.starts_with(want) && !error.contains("secret"),
                "{error}"
            );
        }
        fs::write(&path, "secret").unwrap();
        let error = SecretHeader::read(&written).unwrap_err();
        assert_eq!(
            error,
            format!("{written} does not hold one line \"Name: value\"")
        );
    }
}
