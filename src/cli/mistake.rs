//! Rewrites clap's error messages as one line.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::config::without_password;

/// Returns clap's message as one line, without its usage.
///
/// The usage is left out because `--help` shows it better. If a wrong value came from an
/// environment variable, the line names the variable instead of the flag.
pub(super) fn in_one_line(error: &clap::Error, args: &[OsString]) -> String {
    let text = without_secrets(error);
    let said = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let lines: Vec<&str> = said.filter(|line| !line.is_empty()).collect();
    let line = lines
        .join("; ")
        .trim_start_matches("error: ")
        .replace(":; ", ": ");
    let line = line.replace("invalid digit found in string", "not a whole number");
    let line = line.replace(
        "number would be zero for non-zero type",
        "must be at least 1",
    );
    let line = in_bounds(&line).unwrap_or(line);
    if error.kind() == ErrorKind::MissingRequiredArgument {
        let is_work = args.get(1).is_some_and(|command| command == "work");
        return if is_work && line.contains("<CMD>") {
            format!("{line}; the command stands after --: taskd work QUEUE -- COMMAND")
        } else {
            line.replace("<QUEUE|ID>", "<QUEUE KEY|ID>")
        };
    }
    if error.kind() == ErrorKind::ArgumentConflict && line.starts_with("the subcommand") {
        return format!("{line}; put the options behind the command");
    }
    match error.kind() {
        ErrorKind::MissingSubcommand => return command_needed(error).unwrap_or(line),
        ErrorKind::InvalidSubcommand => {
            let unknown = match error.get(ContextKind::InvalidSubcommand) {
                Some(ContextValue::String(name)) => name.as_str(),
                _ => "",
            };
            let line = format!("there is no command {unknown}");
            let is_first = args.get(1).is_some_and(|first| first == unknown);
            if let Some(hint) = other_word(unknown).filter(|_| is_first) {
                return format!("{line}; {hint}");
            }
            let near = match error.get(ContextKind::SuggestedSubcommand) {
                Some(ContextValue::Strings(names)) => names
                    .iter()
                    .find(|name| is_first && ONLY_READ.contains(&name.as_str())),
                _ => None,
            };
            let help = help_above(error, args);
            return match near {
                Some(near) => format!("{line}; did you mean {near}? {help} lists the commands"),
                None => format!("{line}; {help} lists the commands"),
            };
        }
        _ => {}
    }
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(arg)) if error.kind() == ErrorKind::UnknownArgument => {
            // Drop the tip to pass the unknown flag as a value: nobody means that.
            let line = line.split("; tip: to pass").next().unwrap_or_default();
            match &arg[..] {
                "--grpc" | "--http" | "--url" | "--address" | "--host" => format!(
                    "unexpected argument '{arg}' found; --server URL (TASKD_URL) names taskd, as in 127.0.0.1:7600"
                ),
                _ => with_value(line, arg, args),
            }
        }
        Some(ContextValue::String(arg)) => name_the_variable(line, arg, args),
        _ => line,
    }
}

/// Returns clap's message, with secrets in a wrong value masked.
fn without_secrets(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let (Some(ContextValue::String(arg)), Some(ContextValue::String(value))) = (
        error.get(ContextKind::InvalidArg),
        error.get(ContextKind::InvalidValue),
    ) else {
        return text;
    };
    match arg.split(' ').next() {
        Some("--otlp-headers" | "--token") => text.replace(&format!("'{value}'"), "'***'"),
        _ if value.contains("://") => text.replace(value, &without_password(value)),
        _ => text,
    }
}

/// Rewrites `0 is not in 1..=1000` as `must be 1 to 1000`.
fn in_bounds(line: &str) -> Option<String> {
    let (said, range) = line.rsplit_once(" is not in ")?;
    let (said, value) = said.rsplit_once(": ")?;
    let (least, most) = range.split_once("..")?;
    let [value, least, most] =
        [value, least, most.trim_start_matches('=')].map(|text| text.parse::<i128>().ok());
    let value = value?;
    let least = least?;
    let most = most?;
    // A bound that only comes from the number's type is shown only to those who exceed it.
    Some(if most < i128::from(u32::MAX) {
        format!("{said}: must be {least} to {most}")
    } else if value < least {
        format!("{said}: must be at least {least}")
    } else {
        format!("{said}: must be at most {most}")
    })
}

/// `dead needs a command: list, reasons, show, retry or purge; taskd dead --help says more`
fn command_needed(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(path)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidSubcommand) else {
        return None;
    };
    let (last, others) = known.split_last()?;
    let name = path.trim_start_matches("taskd ");
    Some(format!(
        "{name} needs a command: {} or {last}; {path} --help says more",
        others.join(", ")
    ))
}

/// Suggests what to write instead of a command that other tools have.
fn other_word(unknown: &str) -> Option<&'static str> {
    match unknown {
        "job" | "jobs" => {
            Some("taskd bulk has the changes of many tasks, and taskd tasks lists tasks")
        }
        "run" | "serve" | "start" | "server" | "daemon" | "up" => {
            Some("taskd --pipelines all runs everything")
        }
        "worker" => Some(
            "taskd work QUEUE -- COMMAND runs a command for each task, and taskd --pipelines all runs taskd itself",
        ),
        "list" | "ls" | "ps" => Some("taskd tasks QUEUE lists tasks, and taskd stats lists queues"),
        "queue" | "status" | "info" => Some("taskd stats shows the queues"),
        "show" | "get" | "inspect" => Some("taskd task QUEUE KEY shows a task"),
        _ => None,
    }
}

/// The commands to suggest for a misspelt one. By themselves they change nothing.
const ONLY_READ: [&str; 14] = [
    "tasks",
    "bulk",
    "dead",
    "task",
    "watch",
    "explain",
    "stats",
    "top",
    "books",
    "dump",
    "acts",
    "check-config",
    "completions",
    "man",
];

/// Returns the help command that lists what the unknown command could have been.
fn help_above(error: &clap::Error, args: &[OsString]) -> String {
    let unknown = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(name)) => name.as_str(),
        _ => "",
    };
    match args.get(1).map(|first| first.to_string_lossy()) {
        Some(first) if first != unknown && !first.starts_with('-') => {
            format!("taskd {first} --help")
        }
        _ => "taskd --help".to_owned(),
    }
}

/// Adds how to write a value that clap took for a flag, such as a negative number or a key.
fn with_value(line: &str, arg: &str, args: &[OsString]) -> String {
    let Some(place) = args
        .iter()
        .position(|given| given.to_string_lossy().starts_with(arg))
    else {
        return line.into();
    };
    let before = args[..place].last().map(|arg| arg.to_string_lossy());
    let value = args[place].to_string_lossy();
    match before.filter(|flag| flag.starts_with("--") && !value.starts_with("--")) {
        Some(flag) => format!("{line}; if it is the value of {flag}, write {flag}={value}"),
        None => line.to_owned(),
    }
}

fn name_the_variable(line: String, arg: &str, args: &[OsString]) -> String {
    let flag = arg.split(' ').next().unwrap_or(arg);
    let given = args
        .iter()
        .any(|given| given.to_string_lossy().starts_with(flag));
    let variable = match flag {
        "--server" => "TASKD_URL".to_owned(),
        _ => format!(
            "TASKD_{}",
            flag.trim_start_matches('-')
                .replace('-', "_")
                .to_uppercase()
        ),
    };
    if given || std::env::var_os(&variable).is_none() {
        return line;
    }
    line.replace(&format!("'{arg}'"), &variable)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::super::{Command, Refusal};

    fn parse(args: &[&str]) -> Result<Command, Refusal> {
        super::super::parse(
            std::iter::once("taskd")
                .chain(args.iter().copied())
                .map(OsString::from),
        )
    }

    #[test]
    fn a_wrong_value_shows_no_secret() {
        let cases: [(&[&str], &str); 3] = [
            (
                &["--otlp-headers", "authorization Bearer s3cret"],
                "'***' for '--otlp-headers <LIST>': header 1 is not",
            ),
            (
                &["stats", "--token", "s3\ncret"],
                "'***' for '--token <TOKEN>': it is no token",
            ),
            (
                &["stats", "--server", "ftp://u:s3cret@h"],
                "\"ftp://u:***@h\" is not an address",
            ),
        ];
        for (args, want) in cases {
            let Err(Refusal::Usage(line)) = parse(args) else {
                panic!("{args:?} should be refused")
            };
            assert!(
                line.contains(want) && !line.contains("s3") && !line.contains("cret"),
                "{line:?}"
            );
        }
    }

    #[test]
    fn a_wrong_command_line_is_one_line() {
        let cases: [(&[&str], &str); 28] = [
            (
                &["jobs", "list"],
                "taskd bulk has the changes of many tasks",
            ),
            (
                &["--data-dir", "x", "migrate"],
                "put the options behind the command",
            ),
            (
                &["--pipelines", "all", "--partitions", "four"],
                "not a whole number",
            ),
            (
                &["--pipelines", "fnout"],
                "unknown pipeline \"fnout\"; expected all, discovery, fanout, watchdog, tasks, workflow",
            ),
            (
                &["--pipelnes", "all"],
                "a similar argument exists: '--pipelines'",
            ),
            (
                &["--pipelines", "all", "--partitions", "0"],
                "partitions = 0 (--partitions) must be 1 to 1024",
            ),
            (&["--grace-period", "5"], "\"5\" is not a duration"),
            (
                &["--http-listen", "localhost:7600"],
                "write IP:PORT, for example 127.0.0.1:7600",
            ),
            (
                &["foo"],
                "there is no command foo; taskd --help lists the commands",
            ),
            (
                &["dead", "foo"],
                "there is no command foo; taskd dead --help lists the commands",
            ),
            (
                &["dead"],
                "dead needs a command: list, reasons, show, retry or purge; taskd dead --help says more",
            ),
            (
                &["bulk"],
                "bulk needs a command: list, show or stop; taskd bulk --help says more",
            ),
            (
                &["token"],
                "token needs a command: create, list or revoke; taskd token --help says more",
            ),
            (
                &["load", "--concurrency", "0"],
                "'0' for '--concurrency <N>': must be 1 to 1000",
            ),
            (
                &["insert", "--batch", "0"],
                "'0' for '--batch <N>': must be 1 to 10000",
            ),
            (
                &["tasks", "--limit", "0"],
                "'0' for '--limit <N>': must be at least 1",
            ),
            (
                &["dead", "list", "--limit", "0"],
                "'0' for '--limit <N>': must be at least 1",
            ),
            (
                &["acts", "--last", "0"],
                "'0' for '--last <N>': must be at least 1",
            ),
            (
                &["dump", "q", "--limit", "0"],
                "'0' for '--limit <N>': must be 1 to 1000",
            ),
            (&["partitions", "0"], "'0' for '<COUNT>': must be 1 to 1024"),
            (
                &["tasks", "change", "--replicas", "0"],
                "'0' for '--replicas <NUM>': must be at least 1",
            ),
            (
                &["token", "create", "a", "--calls-per-second", "0"],
                "must be at least 1",
            ),
            (
                &["--pipelines", "all", "--partitions", "99999999999"],
                "must be at most 4294967295",
            ),
            (
                &["bench", "--rate", "-5"],
                "if it is the value of --rate, write --rate=-5",
            ),
            (
                &["stats", "--every", "-1s"],
                "if it is the value of --every, write --every=-1s",
            ),
            (
                &["tasks", "change"],
                "were not provided: <--priority <PRIORITY>|--replicas <NUM>>",
            ),
            (&["watch"], "were not provided: <QUEUE KEY|ID>"),
            (&["cancel"], "were not provided: <QUEUE KEY|ID>"),
        ];
        for (args, want) in cases {
            let Err(Refusal::Usage(line)) = parse(args) else {
                panic!("{args:?} should be refused")
            };
            assert!(line.contains(want), "{line:?} should say {want:?}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }
}
