//! Rejects unknown `TASKD_*` variables, because they are most likely misspelt settings.

use std::ffi::OsStr;

use clap::{Arg, Command, builder::Resettable};

use crate::{config::Properties, model::nearest};

/// Checks that some option of `command` reads each `TASKD_*` variable in `given`.
///
/// An error names the first unknown variable and suggests the most similar setting.
pub(super) fn check(
    command: &Command,
    given: impl IntoIterator<Item = (String, String)>,
) -> Result<(), String> {
    let known = variables(command);
    let strange = |(name, value): &(String, String)| {
        name.starts_with("TASKD_")
            && !known.contains(name)
            && !is_others(name, value)
            && !is_property(name, value)
    };
    let Some((name, _)) = given.into_iter().filter(strange).min() else {
        return Ok(());
    };
    // Suggest only settings, not the variables of commands that call a running taskd.
    let own = settings(command);
    let settings = own.iter().filter_map(|known| known.strip_prefix("TASKD_"));
    let short = name.trim_start_matches("TASKD_");
    Err(match listen(short).or_else(|| nearest(short, settings)) {
        Some(near) => {
            format!("unknown variable {name} in the environment; did you mean TASKD_{near}?")
        }
        None => {
            format!("unknown variable {name} in the environment; taskd --help lists the settings")
        }
    })
}

/// Returns the setting that is meant by names such as `HTTP_PORT` or `GRPC_ADDRESS`.
fn listen(name: &str) -> Option<&'static str> {
    let (protocol, rest) = name.split_once('_').unwrap_or((name, "PORT"));
    if !["PORT", "ADDR", "ADDRESS", "HOST", "URL", "BIND"].contains(&rest) {
        return None;
    }
    match protocol {
        "HTTP" => Some("HTTP_LISTEN"),
        "GRPC" => Some("GRPC_LISTEN"),
        _ => None,
    }
}

/// Returns a warning if a variable looks like the address of taskd but nothing reads it. `run` is
/// the command of `all` that is being run.
pub(super) fn overlooked(
    all: &Command,
    run: &Command,
    given: impl IntoIterator<Item = (String, String)>,
) -> Option<String> {
    if !variables(run).iter().any(|name| name == ADDRESS) {
        return None;
    }
    let known = variables(all);
    let looks_so = |name: &String| LIKE_ADDRESSES.iter().any(|start| name.starts_with(start));
    let strange = |(name, value): &(String, String)| {
        looks_so(name) && !known.contains(name) && !is_others(name, value)
    };
    let (name, _) = given.into_iter().filter(strange).min()?;
    Some(format!(
        "nothing reads the variable {name}; this command takes its address from {ADDRESS}"
    ))
}

/// Makes `command` ignore empty variables: docker compose sets a variable without a value to the
/// empty string.
pub(super) fn without_empty(command: Command) -> Command {
    let is_empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let unset = |arg: Arg| {
        if arg.get_env().is_some_and(is_empty) {
            arg.env(Resettable::Reset)
        } else {
            arg
        }
    };
    command.mut_args(unset).mut_subcommands(without_empty)
}

/// Returns the properties of `[kafka]` that are set in `given`: `TASKD_KAFKA_SASL_PASSWORD` sets
/// `sasl.password`.
pub(super) fn kafka(given: impl IntoIterator<Item = (String, String)>) -> Properties {
    let mut properties = Properties::default();
    for (name, value) in given
        .into_iter()
        .filter(|(name, value)| is_property(name, value))
    {
        properties.set(name[KAFKA.len()..].replace('_', ".").to_lowercase(), value);
    }
    properties
}

/// The variable with the address of a running taskd.
const ADDRESS: &str = "TASKD_URL";
const LIKE_ADDRESSES: [&str; 5] = [
    "TASKD_GRPC",
    "TASKD_HTTP",
    "TASKD_SERVER",
    "TASKD_URL",
    "TASKD_ADDR",
];

const KAFKA: &str = "TASKD_KAFKA_";

fn is_property(name: &str, value: &str) -> bool {
    name.len() > KAFKA.len() && name.starts_with(KAFKA) && !is_others(name, value)
}

/// The variables that the command's own options read.
fn settings(command: &Command) -> Vec<String> {
    command
        .get_arguments()
        .filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned()))
        .collect()
}

/// The variables that the options of a command and of its subcommands read.
fn variables(command: &Command) -> Vec<String> {
    let own = settings(command).into_iter();
    own.chain(command.get_subcommands().flat_map(variables))
        .collect()
}

/// Returns true if the variable is set by Kubernetes, for a service whose name begins with taskd,
/// or by taskd's tests.
fn is_others(name: &str, value: &str) -> bool {
    let rest = name.trim_start_matches("TASKD");
    // `_PORT_7600_TCP`, `_PORT_7600_TCP_ADDR`
    let is_of_port = |behind: &str| {
        let mut parts = behind.split('_');
        parts.next().is_some_and(|port| port.parse::<u16>().is_ok())
            && parts
                .next()
                .is_some_and(|protocol| PROTOCOLS.contains(&protocol))
    };
    let is_url = || {
        let scheme = value
            .split_once("://")
            .map(|(scheme, _)| scheme.to_uppercase());
        scheme.is_some_and(|scheme| PROTOCOLS.contains(&&*scheme))
    };
    rest.starts_with("_TEST_")
        || rest.ends_with("_SERVICE_HOST")
        || rest.contains("_SERVICE_PORT")
        || rest.match_indices("_PORT_").any(|(at, part)| is_of_port(&rest[at + part.len()..]))
        // `_PORT=tcp://10.0.0.1:7600`. A plain number is more likely meant as a setting.
        || (rest.ends_with("_PORT") && is_url())
}

/// The protocols of a service of Kubernetes.
const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use crate::cli::Cli;

    fn check(given: &[&str]) -> Result<(), String> {
        super::check(&Cli::command(), given.iter().map(|given| variable(given)))
    }

    /// `NAME` or `NAME=value`
    fn variable(given: &str) -> (String, String) {
        let (name, value) = given.split_once('=').unwrap_or((given, "x"));
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn a_misspelt_variable_is_refused_with_the_nearest() {
        let error = check(&["PATH", "TASKD_PARTITONS", "TASKD_CONFIG"]).unwrap_err();
        assert_eq!(
            error,
            "unknown variable TASKD_PARTITONS in the environment; did you mean TASKD_PARTITIONS?"
        );
        assert!(
            check(&["TASKD_HTTP_LISTN"])
                .unwrap_err()
                .ends_with("did you mean TASKD_HTTP_LISTEN?")
        );
        assert!(
            check(&["TASKD_HTTP_PORT=8080"])
                .unwrap_err()
                .ends_with("did you mean TASKD_HTTP_LISTEN?")
        );
        assert!(
            check(&["TASKD_URLS=x"])
                .unwrap_err()
                .ends_with("taskd --help lists the settings"),
            "TASKD_URL is none of them"
        );
        let error = check(&["TASKD_FOO"]).unwrap_err();
        assert_eq!(
            error,
            "unknown variable TASKD_FOO in the environment; taskd --help lists the settings"
        );
    }

    #[test]
    fn properties_are_those_that_kubernetes_does_not_tell_of() {
        let given = [
            "TASKD_KAFKA_SASL_PASSWORD",
            "TASKD_KAFKA_SERVICE_HOST",
            "TASKD_KAFKA_PORT_9092_TCP",
            "TASKD_LOG",
        ];
        assert_eq!(
            super::kafka(given.map(variable))
                .names()
                .collect::<Vec<_>>(),
            ["sasl.password"]
        );
        check(&["TASKD_KAFKA_SSL_CA_LOCATION"]).unwrap();
        assert!(check(&["TASKD_KAFKA"]).is_err());
    }

    #[test]
    fn a_variable_that_looks_like_an_address_is_named() {
        let all = Cli::command();
        let line = |run: &str, name: &str| {
            super::overlooked(
                &all,
                all.find_subcommand(run).unwrap(),
                [name, "TASKD_FOO"].map(variable),
            )
        };
        let said = |name| {
            Some(format!(
                "nothing reads the variable {name}; this command takes its address from TASKD_URL"
            ))
        };
        for (run, name) in [
            ("tasks", "TASKD_GRPC"),
            ("tasks", "TASKD_GRPC_URL"),
            ("dead", "TASKD_SERVER"),
            ("stats", "TASKD_HTTP"),
            ("stats", "TASKD_HTTP_URL"),
        ] {
            assert_eq!(line(run, name), said(name));
        }
        for name in [
            "TASKD_URL",
            "TASKD_GRPC_LISTEN",
            "TASKD_HTTP_PORT=tcp://10.0.0.1:80",
        ] {
            assert_eq!(line("tasks", name), None, "{name}");
        }
        assert_eq!(
            line("migrate", "TASKD_GRPC"),
            None,
            "the settings are checked elsewhere"
        );
    }

    #[test]
    fn ours_and_those_of_kubernetes_are_let_through() {
        check(&[
            "TASKD_CONFIG",
            "TASKD_URL",
            "TASKD_LOG",
            "TASKD_TEST_KAFKA",
            "TASKDX",
        ])
        .unwrap();
        check(&[
            "TASKD_PORT=tcp://10.0.0.1:7600",
            "TASKD_PORT_7600_TCP_ADDR",
            "TASKD_SERVICE_HOST",
            "TASKD_SERVICE_PORT_HTTP",
        ])
        .unwrap();
        check(&[
            "TASKD_REDIS_SERVICE_HOST",
            "TASKD_REDIS_SERVICE_PORT",
            "TASKD_REDIS_PORT=udp://h:1",
        ])
        .unwrap();
        check(&[
            "TASKD_REDIS_SERVICE_PORT_TCP",
            "TASKD_REDIS_PORT_6379_TCP",
            "TASKD_PORT_A_PORT_1_SCTP",
        ])
        .unwrap();
        assert!(check(&["TASKD_HTTP_PORT_8080"]).is_err());
    }
}
