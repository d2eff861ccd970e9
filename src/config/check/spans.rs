//! Checks of the settings of traces.

use std::time::Duration;

use tonic::transport::Uri;

use super::Checker;
use crate::config::{Error, Traces, urls::without_query};

impl Checker<'_> {
    pub(super) fn traces(&self, traces: &Traces) -> Result<(), Error> {
        let Traces {
            endpoint,
            timeout,
            sample,
            ..
        } = traces;
        let uri = endpoint
            .parse::<Uri>()
            .ok()
            .filter(|uri| uri.authority().is_some());
        let is_known = uri.is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
        if !endpoint.is_empty() && !is_known {
            let why = "is not the URL of a collector; write http://HOST:4317 or https://HOST:4317";
            return self.fail(
                "otlp_endpoint",
                format!("{:?}", without_query(endpoint)),
                why,
            );
        }
        self.time(
            "otlp_timeout",
            *timeout,
            Duration::from_millis(100)..=Duration::from_secs(60),
        )?;
        self.range("trace_sample", *sample, 0.0..=1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_shown_with_what_would_be_right() {
        let error = |change: fn(&mut Traces)| {
            let mut traces = Traces::default();
            change(&mut traces);
            Checker {
                origins: &Default::default(),
            }
            .traces(&traces)
            .unwrap_err()
            .to_string()
        };
        for (change, want) in [
            (
                (|traces| traces.endpoint = "collector:4317".into()) as fn(&mut Traces),
                "write http://HOST:4317",
            ),
            (
                |traces| traces.endpoint = "ftp://h:1".into(),
                "otlp_endpoint = \"ftp://h:1\" (the default) is not the",
            ),
            (
                |traces| traces.endpoint = "ftp://u:secret@h:1?key=secret".into(),
                "otlp_endpoint = \"ftp://u:***@h:1?***\"",
            ),
            (
                |traces| traces.timeout = Duration::ZERO,
                "otlp_timeout = 0s (the default) must be 100ms to 1m",
            ),
            (
                |traces| traces.sample = 1.5,
                "trace_sample = 1.5 (the default) must be 0 to 1",
            ),
            (
                |traces| traces.sample = f64::NAN,
                "trace_sample = NaN (the default) must be 0 to 1",
            ),
        ] {
            let error = error(change);
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
