//! The URLs of backends, parsed. Their `Display` hides passwords.

use std::{fmt, path::PathBuf, str::FromStr};

use super::{error::Error, origins::Origins};

/// Parses the URL of option `key`. An empty text means none.
pub(super) fn given<T: FromStr<Err = String>>(
    key: &str,
    text: Option<String>,
    origins: &Origins,
) -> Result<Option<T>, Error> {
    let Some(text) = text.filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    match text.parse() {
        Ok(url) => Ok(Some(url)),
        Err(why) => Err(origins.fault(key, format!("{:?}", without_password(&text)), &why)),
    }
}

/// The URL of a Redis server, or of some nodes of a cluster.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl(String);

impl RedisUrl {
    /// The URL, including the password.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn is_tls(&self) -> bool {
        self.0.starts_with("rediss")
    }
}

impl FromStr for RedisUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        scheme(
            url,
            &[
                "redis",
                "rediss",
                "redis+cluster",
                "rediss+cluster",
                "unix",
                "redis+unix",
            ],
        )?;
        Ok(Self(url.to_owned()))
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_password(&self.0))
    }
}

/// Where the database is.
#[derive(Clone, PartialEq, Eq)]
pub enum DatabaseUrl {
    Sqlite(PathBuf),
    /// `mysql://…` or `mariadb://…`, including the password.
    Server(String),
}

impl FromStr for DatabaseUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        match scheme(url, &["mysql", "mariadb", "sqlite"])? {
            "sqlite" => Ok(Self::Sqlite(file(url)?.into())),
            scheme => {
                names_a_database(scheme, url)?;
                has_known_parameters(url)?;
                Ok(Self::Server(url.to_owned()))
            }
        }
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite://{}", path.display()),
            Self::Server(url) => f.write_str(&without_password(url)),
        }
    }
}

/// The path of the SQLite file. Some other forms of SQLite URLs would mean a different file, or
/// none.
fn file(url: &str) -> Result<&str, String> {
    let why = match url.strip_prefix("sqlite://") {
        None => "needs two slashes: write sqlite://PATH",
        Some("") => "names no file: write sqlite://PATH, or nothing for the one in the data folder",
        Some(":memory:") => "would be lost with the process: write sqlite://PATH",
        Some(path) if path.contains(['?', '#']) => "takes no parameters: write sqlite://PATH",
        Some(path) if path.ends_with('/') => "names a folder: write sqlite://PATH",
        Some(path) => return Ok(path),
    };
    Err(why.into())
}

/// Checks that the URL names a database, because a server has many.
fn names_a_database(scheme: &str, url: &str) -> Result<(), String> {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let place = rest.split('?').next().unwrap_or_default();
    let host = place.rsplit('@').next().unwrap_or_default();
    match host.split_once('/') {
        Some((_, name)) if !name.is_empty() => Ok(()),
        _ => Err(format!(
            "names no database; write {scheme}://user:password@host/taskd"
        )),
    }
}

/// Rejects unknown parameters, which sqlx would ignore: somebody who writes `ssl_mode` would go
/// without TLS.
fn has_known_parameters(url: &str) -> Result<(), String> {
    const KNOWN: [&str; 5] = ["ssl-mode", "ssl-ca", "ssl-cert", "ssl-key", "socket"];
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let mut names = query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split('=').next().unwrap_or(pair));
    match names.find(|name| !KNOWN.contains(name)) {
        None => Ok(()),
        // The name may be a part of the password.
        Some(_) if query.contains('@') => {
            Err("has a ? in its password, which is written %3F".into())
        }
        Some(name) => Err(format!(
            "has an unknown parameter {name:?}; expected {}",
            KNOWN.join(", ")
        )),
    }
}

/// Where the bus is, if it is a Kafka.
#[derive(Clone, PartialEq, Eq)]
pub struct BusUrl {
    /// `host:port,host:port`
    pub brokers: String,
}

impl FromStr for BusUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        scheme(url, &["kafka"])?;
        Ok(Self {
            brokers: url.strip_prefix("kafka://").unwrap_or(url).to_owned(),
        })
    }
}

impl fmt::Display for BusUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_password(&format!("kafka://{}", self.brokers)))
    }
}

macro_rules! debug_as_shown {
    ($($url:ty)*) => {
        $(impl fmt::Debug for $url {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        })*
    };
}
debug_as_shown!(RedisUrl DatabaseUrl BusUrl);

/// The scheme of the URL, which must be one of `known` and be followed by something.
fn scheme<'a>(url: &'a str, known: &[&str]) -> Result<&'a str, String> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    // SQLite's path is checked later.
    if known.contains(&scheme) && (!rest.is_empty() || scheme == "sqlite") {
        return Ok(scheme);
    }
    let expected = known
        .iter()
        .map(|scheme| format!("{scheme}://…"))
        .collect::<Vec<_>>()
        .join(", ");
    Err(format!("is not usable; expected {expected}"))
}

/// The URL with its passwords hidden.
///
/// This does not use a URL parser, because taskd also shows URLs that it rejects, and Kafka's
/// broker lists are not URLs.
pub fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return hide_credentials(url);
    };
    format!("{scheme}://{}", hide_credentials(rest))
}

/// The URL of a collector, with its password and its query hidden, because the query may contain a
/// key.
pub(super) fn without_query(url: &str) -> String {
    let shown = without_password(url);
    match shown.split_once('?') {
        Some((place, _)) => format!("{place}?***"),
        None => shown,
    }
}

fn hide_credentials(rest: &str) -> String {
    // A password may contain any character, even an unescaped /, ? or @, so the credentials end at
    // the last @.
    if let Some((credentials, place)) = rest.rsplit_once('@')
        && let Some((user, _)) = credentials.split_once(':')
    {
        return format!("{user}:***@{}", hide_parameters(place));
    }
    hide_parameters(rest)
}

fn hide_parameters(place: &str) -> String {
    let Some((place, query)) = place.split_once('?') else {
        return place.to_owned();
    };
    let hide = |pair: &str| match pair.split_once('=') {
        Some((name, _)) if name.to_ascii_lowercase().contains("pass") => format!("{name}=***"),
        _ => pair.to_owned(),
    };
    format!(
        "{place}?{}",
        query.split('&').map(hide).collect::<Vec<_>>().join("&")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_hidden_wherever_they_stand() {
        let cases = [
            ("redis://:secret@h:1/0", "redis://:***@h:1/0"),
            (
                "redis+cluster://u:se,cr@et@a:1,b:2",
                "redis+cluster://u:***@a:1,b:2",
            ),
            ("mysql://u:se/cr@t@h/db", "mysql://u:***@h/db"),
            ("mysql://u:se?cr/e@t@h/db", "mysql://u:***@h/db"),
            (
                "mysql://u:secret@h/db?ssl-mode=x",
                "mysql://u:***@h/db?ssl-mode=x",
            ),
            (
                "mysql://u:se?cret=@h/db?password=secret",
                "mysql://u:***@h/db?password=***",
            ),
            ("mysql://h/db?password=sec@ret", "mysql://h/db?password=***"),
            ("redis://:se?cret@h", "redis://:***@h"),
            (
                "mysql://h/db?ssl-mode=x&password=secret",
                "mysql://h/db?ssl-mode=x&password=***",
            ),
            ("kafka://a:9092,b:9092", "kafka://a:9092,b:9092"),
            (
                "kafka://u:secret@a:9092,b:9092",
                "kafka://u:***@a:9092,b:9092",
            ),
            ("sqlite://x.db", "sqlite://x.db"),
            ("u:secret@h", "u:***@h"),
        ];
        for (url, shown) in cases {
            assert_eq!(without_password(url), shown);
        }
        assert_eq!(
            "redis://:secret@h".parse::<RedisUrl>().unwrap().to_string(),
            "redis://:***@h"
        );
    }

    #[test]
    fn the_query_of_a_collector_is_hidden() {
        assert_eq!(
            without_query("https://u:secret@h:1/p?key=secret&a"),
            "https://u:***@h:1/p?***"
        );
        assert_eq!(without_query("https://h:1/p"), "https://h:1/p");
    }

    #[test]
    fn a_url_that_is_wrong_is_shown_without_its_password() {
        let cases = [
            (
                "redis_url",
                "redis+sentinel://:p@h",
                "redis_url = \"redis+sentinel://:***@h\" (the default) is not usable; expected redis://…, \
                 rediss://…, redis+cluster://…",
            ),
            (
                "redis_url",
                "localhost:6379",
                "redis_url = \"localhost:6379\" (the default) is not usable; expected redis://…, rediss://…",
            ),
            (
                "database_url",
                "postgres://u:p@h/d",
                "database_url = \"postgres://u:***@h/d\" (the default) is not usable; expected mysql://…, \
                 mariadb://…, sqlite://…",
            ),
            (
                "database_url",
                "sqlite:foo.db",
                "\"sqlite:foo.db\" (the default) needs two slashes",
            ),
            (
                "database_url",
                "sqlite://",
                "names no file: write sqlite://PATH, or nothing",
            ),
            (
                "database_url",
                "sqlite://:memory:",
                "would be lost with the process",
            ),
            (
                "database_url",
                "sqlite://a.db?mode=ro",
                "takes no parameters: write sqlite://PATH",
            ),
            (
                "database_url",
                "sqlite:///var/lib/",
                "names a folder: write sqlite://PATH",
            ),
            (
                "database_url",
                "mysql://u:p@h",
                "database_url = \"mysql://u:***@h\" (the default) names no database; write \
                 mysql://user:password@host/taskd",
            ),
            (
                "database_url",
                "mariadb://u:p@h:3306/?ssl-mode=x/y",
                "names no database",
            ),
            (
                "database_url",
                "mysql://u:p@h/d?ssl-ca=/c&ssl_mode=REQUIRED",
                "has an unknown parameter \"ssl_mode\"; expected ssl-mode, ssl-ca, ",
            ),
            (
                "database_url",
                "mysql://u:a/b?c=1@h/d",
                "\"mysql://u:***@h/d\" (the default) has a ? in its password",
            ),
            ("bus_url", "nats://h", "expected kafka://…"),
            ("bus_url", "kafka://", "expected kafka://…"),
        ];
        for (key, text, want) in cases {
            let text = Some(text.to_owned());
            let none = Origins::default();
            let error = match key {
                "redis_url" => given::<RedisUrl>(key, text, &none).err(),
                "database_url" => given::<DatabaseUrl>(key, text, &none).err(),
                _ => given::<BusUrl>(key, text, &none).err(),
            };
            let error = error.unwrap().to_string();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
