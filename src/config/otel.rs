//! OpenTelemetry's environment variables (`OTEL_…`). taskd's own settings take precedence, because
//! these variables are often set for all programs of a machine.
//!
//! They are read only if spans are exported, so an invalid variable does not stop a taskd that
//! exports none.

use std::time::Duration;

use super::{
    error::Error,
    options::Options,
    origins::{Origin, Origins},
    traces::{OtlpHeaders, OtlpProtocol, decoded},
    units::Time,
};

/// Fills the trace settings that are not set otherwise. Returns the resource attributes.
///
/// An empty variable counts as unset.
pub(super) fn fill(
    options: &mut Options,
    origins: &mut Origins,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Vec<(String, String)>, Error> {
    let get = |name: &'static str| {
        let value = variable(name)
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty());
        value.map(|value| (name, value))
    };
    if is_off(get) && options.otlp_endpoint.is_none() {
        return Ok(Vec::new());
    }
    let mut note = |key: &str, name| origins.insert(key.to_owned(), Origin::Variable(name));
    let endpoint = match &options.otlp_endpoint {
        Some(_) => None,
        None => get(TRACES_ENDPOINT).or_else(|| get(ENDPOINT)),
    };
    if endpoint.is_none()
        && options
            .otlp_endpoint
            .as_deref()
            .unwrap_or_default()
            .is_empty()
    {
        return Ok(Vec::new());
    }
    if options.otlp_protocol.is_none()
        && let Some((name, value)) =
            get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL").or_else(|| get("OTEL_EXPORTER_OTLP_PROTOCOL"))
    {
        let known = [OtlpProtocol::Grpc, OtlpProtocol::Http]
            .into_iter()
            .find(|known| known.as_str() == value);
        options.otlp_protocol =
            Some(known.ok_or_else(|| wrong(name, &value, "write grpc or http/protobuf"))?);
        note("otlp_protocol", name);
    }
    if let Some((name, value)) = endpoint {
        // Only the variable for all signals gives a base URL, to which the path is appended.
        let is_base = name == ENDPOINT && options.otlp_protocol == Some(OtlpProtocol::Http);
        options.otlp_endpoint = Some(if is_base {
            format!("{}/v1/traces", value.trim_end_matches('/'))
        } else {
            value
        });
        note("otlp_endpoint", name);
    }
    if options.otlp_headers.is_none()
        && let Some((name, value)) =
            get("OTEL_EXPORTER_OTLP_TRACES_HEADERS").or_else(|| get("OTEL_EXPORTER_OTLP_HEADERS"))
    {
        // The error must not show the value, which is secret.
        let headers =
            OtlpHeaders::encoded(&value).map_err(|why| Error::Value(format!("{name}: {why}")))?;
        options.otlp_headers = Some(headers);
        note("otlp_headers", name);
    }
    if options.otlp_timeout.is_none()
        && let Some((name, value)) =
            get("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT").or_else(|| get("OTEL_EXPORTER_OTLP_TIMEOUT"))
    {
        let ms = value
            .parse()
            .map_err(|_| wrong(name, &value, "write milliseconds, a whole number"))?;
        options.otlp_timeout = Some(Time(Duration::from_millis(ms)));
        note("otlp_timeout", name);
    }
    if options.trace_sample.is_none()
        && let Some((name, value)) = get(SAMPLER)
    {
        options.trace_sample = Some(sample(&value, get(SAMPLER_ARG))?);
        note("trace_sample", name);
    }
    resource(get)
}

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";

/// True if the variables turn off the export of spans, or select an exporter other than OTLP.
fn is_off(get: impl Fn(&'static str) -> Option<(&'static str, String)>) -> bool {
    let is_disabled =
        get("OTEL_SDK_DISABLED").is_some_and(|(_, value)| value.eq_ignore_ascii_case("true"));
    let others = get("OTEL_TRACES_EXPORTER")
        .is_some_and(|(_, list)| !list.split(',').any(|one| one.trim() == "otlp"));
    is_disabled || others
}

/// The fraction to sample of tasks without a caller's context. If there is one, the caller's
/// decision always applies.
fn sample(sampler: &str, argument: Option<(&'static str, String)>) -> Result<f64, Error> {
    match sampler.strip_prefix("parentbased_").unwrap_or(sampler) {
        "always_on" => Ok(1.0),
        "always_off" => Ok(0.0),
        "traceidratio" => match argument {
            None => Ok(1.0),
            Some((name, value)) => {
                let part = value.parse().ok().filter(|part| (0.0..=1.0).contains(part));
                part.ok_or_else(|| wrong(name, &value, "write a part of all, 0.0 to 1.0"))
            }
        },
        _ => Err(wrong(
            SAMPLER,
            sampler,
            "write always_on, always_off or traceidratio, also behind parentbased_",
        )),
    }
}

/// The resource attributes. `OTEL_SERVICE_NAME` overrides `service.name` in the list.
fn resource(
    get: impl Fn(&'static str) -> Option<(&'static str, String)>,
) -> Result<Vec<(String, String)>, Error> {
    let mut attributes: Vec<(String, String)> = Vec::new();
    if let Some((name, list)) = get("OTEL_RESOURCE_ATTRIBUTES") {
        for pair in list
            .split(',')
            .map(str::trim)
            .filter(|pair| !pair.is_empty())
        {
            let read = pair
                .split_once('=')
                .and_then(|(key, value)| Some((decoded(key)?, decoded(value)?)));
            attributes.push(read.ok_or_else(|| wrong(name, pair, "write name=value,name=value"))?);
        }
    }
    if let Some((_, service)) = get("OTEL_SERVICE_NAME") {
        attributes.retain(|(key, _)| key != "service.name");
        attributes.push(("service.name".to_owned(), service));
    }
    Ok(attributes)
}

fn wrong(name: &str, value: &str, todo: &str) -> Error {
    Error::Value(format!("{name}: {value:?} is not known; {todo}"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    type Filled = (Options, Origins, Vec<(String, String)>);

    fn filled(mut options: Options, variables: &[(&str, &str)]) -> Result<Filled, String> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        let mut origins = Origins::default();
        let read = |name: &str| variables.get(name).map(|value| (*value).to_owned());
        let resource = fill(&mut options, &mut origins, read).map_err(|error| error.to_string())?;
        Ok((options, origins, resource))
    }

    #[test]
    fn variables_fill_what_nothing_else_gives() {
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4318/"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%2Cb, x = y"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "2500"),
            ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
            ("OTEL_SERVICE_NAME", "crawler"),
            (
                "OTEL_RESOURCE_ATTRIBUTES",
                "service.name=other,deployment.environment=a%20b",
            ),
        ];
        let (options, origins, resource) = filled(Options::default(), &variables).unwrap();
        assert_eq!(
            options.otlp_endpoint.as_deref(),
            Some("http://h:4318/v1/traces")
        );
        assert_eq!(options.otlp_protocol, Some(OtlpProtocol::Http));
        let headers: Vec<_> = options.otlp_headers.as_ref().unwrap().pairs().collect();
        assert_eq!(
            (headers[0].0.as_str(), headers[0].1.to_str().unwrap()),
            ("api-key", "a,b")
        );
        assert_eq!(
            (headers[1].0.as_str(), headers[1].1.to_str().unwrap()),
            ("x", "y")
        );
        assert_eq!(
            options.otlp_timeout,
            Some(Time(Duration::from_millis(2500)))
        );
        assert_eq!(options.trace_sample, Some(0.25));
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(
            resource,
            [
                pair("deployment.environment", "a b"),
                pair("service.name", "crawler")
            ]
        );
        assert_eq!(
            origins.describe("otlp_endpoint").unwrap(),
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        );

        let own = Options {
            otlp_endpoint: Some("http://own:4317".into()),
            otlp_protocol: Some(OtlpProtocol::Grpc),
            otlp_headers: Some("a=b".parse().unwrap()),
            otlp_timeout: Some(Time(Duration::from_secs(1))),
            trace_sample: Some(0.5),
            ..Options::default()
        };
        let (options, origins, _) = filled(own.clone(), &variables).unwrap();
        assert_eq!(
            (options, origins),
            (own, Origins::default()),
            "taskd's own settings win"
        );
    }

    #[test]
    fn variables_of_a_machine_turn_nothing_on_that_was_turned_off() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4317");
        let wrong = ("OTEL_TRACES_SAMPLER", "jaeger_remote");
        let off = Options {
            otlp_endpoint: Some(String::new()),
            ..Options::default()
        };
        for (options, variables) in [
            (
                Options::default(),
                vec![("OTEL_EXPORTER_OTLP_ENDPOINT", " "), wrong],
            ),
            (
                Options::default(),
                vec![endpoint, ("OTEL_SDK_DISABLED", "TRUE"), wrong],
            ),
            (
                Options::default(),
                vec![endpoint, ("OTEL_TRACES_EXPORTER", "console"), wrong],
            ),
            (off, vec![endpoint, wrong]),
        ] {
            let (after, _, resource) = filled(options.clone(), &variables).unwrap();
            assert_eq!((after, resource), (options, Vec::new()));
        }
        let others = [endpoint, ("OTEL_TRACES_EXPORTER", "console, otlp")];
        assert_eq!(
            filled(Options::default(), &others)
                .unwrap()
                .0
                .otlp_endpoint
                .as_deref(),
            Some("http://h:4317")
        );
        let traces = [
            endpoint,
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:1/path"),
        ];
        assert_eq!(
            filled(Options::default(), &traces)
                .unwrap()
                .0
                .otlp_endpoint
                .as_deref(),
            Some("http://t:1/path")
        );
    }

    #[test]
    fn a_wrong_variable_is_one_line_that_names_it_and_no_secret() {
        for (name, value, want) in [
            (
                "OTEL_EXPORTER_OTLP_PROTOCOL",
                "http/json",
                "OTEL_EXPORTER_OTLP_PROTOCOL: \"http/json\" is not known; ",
            ),
            (
                "OTEL_EXPORTER_OTLP_TIMEOUT",
                "10s",
                "OTEL_EXPORTER_OTLP_TIMEOUT: \"10s\" is not known; write millis",
            ),
            (
                "OTEL_EXPORTER_OTLP_HEADERS",
                "secret",
                "OTEL_EXPORTER_OTLP_HEADERS: header 1 is not name=value",
            ),
            (
                "OTEL_EXPORTER_OTLP_HEADERS",
                "a=%zz",
                "OTEL_EXPORTER_OTLP_HEADERS: header 1 is not name=value",
            ),
            (
                "OTEL_TRACES_SAMPLER",
                "jaeger_remote",
                "OTEL_TRACES_SAMPLER: \"jaeger_remote\" is not known; write always",
            ),
            (
                "OTEL_RESOURCE_ATTRIBUTES",
                "a",
                "OTEL_RESOURCE_ATTRIBUTES: \"a\" is not known; write name=value",
            ),
        ] {
            let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4317");
            let error = filled(Options::default(), &[endpoint, (name, value)]).unwrap_err();
            assert!(
                error.starts_with(want) && !error.contains("secret"),
                "{error}"
            );
        }
        assert!(sample("traceidratio", Some((SAMPLER_ARG, "2".into()))).is_err());
    }
}
