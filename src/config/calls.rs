//! Settings of the HTTP calls of workflows.

use std::{collections::BTreeMap, env, fmt, fs, net::IpAddr, path::PathBuf, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use url::Url;

/// What calls may reach, and with which secrets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calls {
    /// The hosts that calls may reach at private addresses.
    pub allow: CallHosts,
    /// Servers that stand in for others.
    pub overrides: CallOverrides,
    pub secrets: CallSecrets,
}

/// Hosts: names, `.name` for all below it, IP addresses, or `*` for any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallHosts(Vec<String>);

impl CallHosts {
    /// Whether a host is named. An IPv6 address is without brackets.
    pub fn names(&self, host: &str) -> bool {
        let host = plain(host);
        self.0.iter().any(|pattern| match pattern.as_str() {
            "*" => true,
            name if name.starts_with('.') => host.ends_with(name) || host == name[1..],
            name => host == name,
        })
    }
}

/// A host in the form in which hosts are compared.
fn plain(host: &str) -> String {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_string(),
        Err(_) => host,
    }
}

impl FromStr for CallHosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let host = |written: &str| {
            let host = written.trim_start_matches('[').trim_end_matches(']');
            let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            let is_host = host == "*" || host.parse::<IpAddr>().is_ok() || host.chars().all(legal);
            match is_host {
                true => Ok(plain(host)),
                false => Err(format!(
                    "{written:?} is not a host; write a name or an IP address without scheme and port, .name for all \
                     below it, or *"
                )),
            }
        };
        parts(text).map(host).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for CallHosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

/// The parts of a comma list.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
}

/// A list of `URL -> URL`, of scheme and host with its port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallOverrides(Vec<(Url, Url)>);

impl CallOverrides {
    /// The URL to call instead of this one, if another server stands in for its own.
    pub fn of(&self, url: &Url) -> Option<Url> {
        let origin = url.origin();
        let (_, to) = self.0.iter().find(|(from, _)| from.origin() == origin)?;
        let mut url = url.clone();
        let set = url.set_scheme(to.scheme()).is_ok()
            && url.set_host(to.host_str()).is_ok()
            && url.set_port(to.port()).is_ok();
        set.then_some(url)
    }
}

impl FromStr for CallOverrides {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let server = |written: &str| {
            let url = Url::parse(written.trim()).ok().filter(|url| {
                let is_web = matches!(url.scheme(), "http" | "https") && url.has_host();
                let is_bare =
                    url.path() == "/" && url.query().is_none() && url.fragment().is_none();
                is_web && is_bare && url.username().is_empty() && url.password().is_none()
            });
            url.ok_or_else(|| {
                "an override is not https://HOST -> http://HOST:PORT, two servers without paths"
                    .to_owned()
            })
        };
        let pair = |part: &str| {
            let (from, to) = part.split_once("->").unwrap_or((part, ""));
            Ok((server(from)?, server(to)?))
        };
        let pairs = parts(text).map(pair);
        pairs.collect::<Result<_, String>>().map(Self)
    }
}

impl fmt::Display for CallOverrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = |url: &Url| url.origin().ascii_serialization();
        let pair = |(from, to): &(Url, Url)| format!("{} -> {}", origin(from), origin(to));
        let pairs: Vec<String> = self.0.iter().map(pair).collect();
        f.write_str(&pairs.join(", "))
    }
}

/// Secrets by name: `NAME=env:VAR,NAME=file:/path`. Their values are read when they are used, so
/// nothing shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallSecrets(BTreeMap<String, Source>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Env(String),
    File(PathBuf),
}

impl Source {
    fn read(&self) -> Result<String, String> {
        let text = match self {
            Self::Env(name) => {
                // The error of one that is no text would show it.
                env::var(name).map_err(|error| match error {
                    env::VarError::NotPresent => format!("the variable {name} is not set"),
                    env::VarError::NotUnicode(_) => format!("the variable {name} is no text"),
                })?
            }
            Self::File(path) => fs::read_to_string(path)
                .map_err(|error| format!("cannot read {}: {error}", path.display()))?,
        };
        let text = text.trim();
        match text.is_empty() {
            true => Err(format!("{self} is empty")),
            false => Ok(text.to_owned()),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

impl CallSecrets {
    /// The value of a secret, as its file has it now. The error does not contain it.
    pub fn read(&self, name: &str) -> Result<String, String> {
        let source = self.0.get(name).ok_or_else(|| {
            format!("there is no secret {name:?}; add {name}=env:VARIABLE or {name}=file:PATH to workflow_secrets")
        })?;
        source
            .read()
            .map_err(|why| format!("the secret {name:?}: {why}"))
    }
}

impl FromStr for CallSecrets {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut secrets = BTreeMap::new();
        for (place, part) in parts(text).enumerate() {
            // Do not echo the text, which may be the secret itself.
            let wrong = || {
                format!(
                    "secret {} is not named; write NAME=env:VARIABLE or NAME=file:PATH",
                    place + 1
                )
            };
            let (name, source) = part.split_once('=').ok_or_else(wrong)?;
            let (name, source) = (name.trim(), source.trim());
            let source = match source.split_once(':') {
                Some(("env", name)) => Source::Env(name.to_owned()),
                Some(("file", path)) => Source::File(path.into()),
                _ => return Err(wrong()),
            };
            if name.is_empty() {
                return Err(wrong());
            }
            source
                .read()
                .map_err(|why| format!("the secret {name:?}: {why}"))?;
            if secrets.insert(name.to_owned(), source).is_some() {
                return Err(format!("the secret {name:?} is there twice"));
            }
        }
        Ok(Self(secrets))
    }
}

impl fmt::Display for CallSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secrets = self
            .0
            .iter()
            .map(|(name, source)| format!("{name}={source}"));
        f.write_str(&secrets.collect::<Vec<_>>().join(","))
    }
}

macro_rules! as_text {
    ($($type:ty)*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    )*};
}
as_text!(CallHosts CallOverrides CallSecrets);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_named_by_themselves_or_by_patterns() {
        let hosts: CallHosts = "Shop.local, .example.org, 10.1.2.3, [::1]".parse().unwrap();
        assert_eq!(hosts.to_string(), "shop.local,.example.org,10.1.2.3,::1");
        for host in [
            "shop.local",
            "a.EXAMPLE.org.",
            "example.org",
            "10.1.2.3",
            "0:0::1",
        ] {
            assert!(hosts.names(host), "{host}");
        }
        for host in ["a.shop.local", "badexample.org", "10.1.2.4", "localhost"] {
            assert!(!hosts.names(host), "{host}");
        }
        assert!("*".parse::<CallHosts>().unwrap().names("localhost"));
        assert!("http://a".parse::<CallHosts>().is_err());
    }

    #[test]
    fn an_override_replaces_scheme_and_authority() {
        let text = "https://petstore.example -> http://127.0.0.1:9000, http://a -> https://b";
        let overrides: CallOverrides = text.parse().unwrap();
        assert_eq!(overrides.to_string(), text);
        let of = |url: &str| overrides.of(&url.parse().unwrap()).map(String::from);
        assert_eq!(
            of("https://petstore.example:443/v2/pet?id=1").as_deref(),
            Some("http://127.0.0.1:9000/v2/pet?id=1")
        );
        assert_eq!(of("http://a/x").as_deref(), Some("https://b/x"));
        assert_eq!(of("http://petstore.example/v2"), None);
        for wrong in ["https://a", "https://a/b -> http://c", "a -> b"] {
            assert!(wrong.parse::<CallOverrides>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_secret_is_read_when_it_is_used_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "secret\n").unwrap();
        let written = format!("bank=file:{}", path.display());
        let secrets: CallSecrets = written.parse().unwrap();
        assert_eq!(secrets.read("bank").unwrap(), "secret");
        assert!(!format!("{secrets:?} {secrets}").contains("secret"));
        fs::write(&path, "other").unwrap();
        assert_eq!(secrets.read("bank").unwrap(), "other");
        assert!(
            secrets
                .read("shop")
                .unwrap_err()
                .contains("workflow_secrets")
        );
        for wrong in [
            "secret",
            "bank=secret",
            "bank=env:NO_SUCH_VARIABLE",
            "=env:PATH",
        ] {
            let error = wrong.parse::<CallSecrets>().unwrap_err();
            assert!(!error.contains("=secret"), "{error}");
        }
    }
}
