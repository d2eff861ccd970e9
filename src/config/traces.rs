//! The settings of traces.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};

/// Where to export spans, and which tasks to trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Traces {
    /// The OTLP endpoint of a collector. If it is empty, this process exports nothing.
    pub endpoint: String,
    pub protocol: OtlpProtocol,
    /// Resource attributes in addition to taskd's own, which they override.
    pub resource: Vec<(String, String)>,
    pub headers: OtlpHeaders,
    /// The time limit of a call to the collector.
    pub timeout: Duration,
    /// The fraction of tasks without a caller's context to sample, 0 to 1.
    pub sample: f64,
    pub discovered: TraceDiscovered,
}

impl Default for Traces {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            protocol: OtlpProtocol::Grpc,
            resource: Vec::new(),
            headers: OtlpHeaders::default(),
            timeout: Duration::from_secs(10),
            sample: 0.0,
            discovered: TraceDiscovered::Child,
        }
    }
}

/// The protocol to a collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum OtlpProtocol {
    #[default]
    #[value(name = "grpc")]
    #[serde(rename = "grpc")]
    Grpc,
    /// Protobuf over HTTP POST.
    #[value(name = "http/protobuf")]
    #[serde(rename = "http/protobuf")]
    Http,
}

impl OtlpProtocol {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Http => "http/protobuf",
        }
    }
}

/// The trace of a task that a sampled task discovered and to which the worker gave no trace
/// context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceDiscovered {
    /// The trace of the parent, so that a trace grows with its crawl.
    #[default]
    Child,
    /// A new trace with a link to the parent, if `trace_sample` picks the task.
    Link,
}

/// Headers of each call to the collector: `name=value,…`. The values are secret.
#[derive(Clone, Default, PartialEq)]
pub struct OtlpHeaders(Vec<(AsciiMetadataKey, AsciiMetadataValue)>);

impl OtlpHeaders {
    pub fn pairs(&self) -> impl Iterator<Item = (AsciiMetadataKey, AsciiMetadataValue)> + '_ {
        self.0.iter().cloned()
    }

    /// Parses the format of OpenTelemetry's variables, in which `%2C` in a value is a comma.
    pub(super) fn encoded(text: &str) -> Result<Self, String> {
        Self::read(text, decoded)
    }

    /// Parses headers. Error messages contain no value.
    fn read(text: &str, decode: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let pairs = text
            .split(',')
            .map(str::trim)
            .filter(|pair| !pair.is_empty())
            .enumerate();
        let pair = |(place, pair): (usize, &str)| {
            let wrong = || {
                format!(
                    "header {} is not name=value; write name=value,name=value",
                    place + 1
                )
            };
            let (name, value) = pair.split_once('=').ok_or_else(wrong)?;
            let name = name.trim().to_lowercase().parse().map_err(|_| wrong())?;
            let value = decode(value).ok_or_else(wrong)?;
            let mut value: AsciiMetadataValue = value.parse().map_err(|_| wrong())?;
            value.set_sensitive(true);
            Ok((name, value))
        };
        pairs.map(pair).collect::<Result<_, String>>().map(Self)
    }
}

/// Decodes the `%XX` sequences of a text. Returns `None` if one is invalid.
pub(super) fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.trim().as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        bytes.push(match first {
            b'%' => {
                let (digits, behind) = rest.split_at_checked(2)?;
                rest = behind;
                let digits = std::str::from_utf8(digits)
                    .ok()
                    .filter(|digits| !digits.starts_with('+'))?;
                u8::from_str_radix(digits, 16).ok()?
            }
            other => *other,
        });
    }
    String::from_utf8(bytes).ok()
}

impl FromStr for OtlpHeaders {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::read(text, |value| Some(value.trim().to_owned()))
    }
}

impl fmt::Display for OtlpHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            &self
                .0
                .iter()
                .map(|(name, _)| format!("{name}=***"))
                .collect::<Vec<_>>()
                .join(","),
        )
    }
}

impl fmt::Debug for OtlpHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for OtlpHeaders {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for OtlpHeaders {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_and_their_values_hidden() {
        let headers: OtlpHeaders = "Authorization=Bearer a=b, x-team=crawl,".parse().unwrap();
        let pairs: Vec<_> = headers.pairs().collect();
        assert_eq!(
            (pairs[0].0.as_str(), pairs[0].1.to_str().unwrap()),
            ("authorization", "Bearer a=b")
        );
        assert_eq!((pairs[1].0.as_str(), pairs.len()), ("x-team", 2));
        assert_eq!(
            format!("{headers} {headers:?}"),
            "authorization=***,x-team=*** authorization=***,x-team=***"
        );
        for wrong in ["secret", "a=b,secret", "a b=secret", "a=sec\nret"] {
            let error = wrong.parse::<OtlpHeaders>().unwrap_err();
            assert!(
                error.contains("is not name=value") && !error.contains("secret"),
                "{error}"
            );
        }
    }
}
