//! The whole binary: arguments, configuration, run; exit codes.
//!
//! 0: done. 1: taskd failed; what it names (task, tree, letter, bulk change, token, queue, topic, workflow,
//! execution, subscription or shard) does not exist; `tree` saw its tree fail, or not end in time;
//! `execution start --wait` saw no end in time; `insert`
//! had lines rejected, `topic` had records rejected, or `insert --wait` saw tasks that were not
//! completed; `books` found a queue unbalanced; `fsck` left a difference unrepaired or unchecked;
//! `workflow` found mistakes; `watch` saw its task end without completion; the queue of `wait` was
//! not drained in time; `dead`, `tasks`, `cancel`, `change` or `requeue` could not change
//! something; the bulk change of `tasks` or `bulk` failed or was stopped; or `bench` or `load`
//! counted a task too few or too many times. 2: the command line or the settings are wrong, or the
//! command cannot reach its server. 3: the execution of `workflow run` or `execution start --wait` faulted or was
//! cancelled, or a tree of `topology run` failed. 130, 143: a signal ended `insert`.

use std::{future::Future, io::Read, pin::Pin, process::ExitCode, time::Duration};

use anyhow::{Context, anyhow};
use nix::{
    sys::{
        signal::{Signal, kill},
        stat::{Mode, umask},
    },
    unistd::Pid,
};

use super::{
    Client, Command, USAGE,
    ask::printable,
    bench, books, bulk, change, command_line, dead, dump, events, execution, explain, fsck, insert,
    limits, load, parse,
    print::{NotThere, Unwritten, print, say},
    stats, subscription, task, tasks, token, top, topic, topology, tree, wait, watch, work,
    workers, workflow,
};
use crate::{
    app::{self, NeverRan},
    config::{self, Loaded, Settings},
    model::in_short,
    telemetry::logging,
};

/// The `main` of the binary.
pub fn run() -> ExitCode {
    // Redis and MySQL use the process's default TLS provider. Installing it fails only if there is
    // one already.
    drop(rustls::crypto::ring::default_provider().install_default());
    let command = match parse(std::env::args_os()) {
        Ok(command) => command,
        Err(refusal) => return refusal.show(),
    };
    // Only this user may read the files that taskd makes. Files of a command that `work` runs, and
    // manual pages, get the permissions that are usual for the user.
    let is_for_its_user = matches!(
        command,
        Command::Client(Client::Work(_) | Client::Man(_) | Client::Topology(_))
    );
    if !is_for_its_user {
        umask(Mode::from_bits_truncate(0o077));
    }
    match command {
        Command::Run {
            loaded,
            stop_with_stdin,
        } => match check(&loaded) {
            Ok(()) => {
                let idle = config::without_effect(&loaded);
                let settings = loaded.settings;
                let ready = if stop_with_stdin {
                    stop_with(std::io::stdin())
                } else {
                    Ok(())
                };
                let ready = ready.and_then(|()| with_logging(&settings));
                idle.iter().for_each(|line| tracing::warn!("{line}"));
                exit(ready.and_then(|()| block_on(app::run(settings))?), 1)
            }
            mistake => exit(mistake, USAGE),
        },
        Command::Migrate(settings) => {
            let answer = with_logging(&settings).and_then(|()| block_on(app::migrate(settings))?);
            exit(answer.and_then(|answer| Ok(print(answer)?)), 1)
        }
        Command::Partitions(settings, count) => {
            let answer = with_logging(&settings)
                .and_then(|()| block_on(app::raise_partitions(settings, count))?);
            exit(answer.and_then(|answer| Ok(print(answer)?)), 1)
        }
        Command::Token(command, settings) => {
            exit(block_on(token::run(command, settings)).flatten(), USAGE)
        }
        Command::Acts(list, settings) => {
            exit(block_on(token::list_acts(list, settings)).flatten(), USAGE)
        }
        Command::Events(args, settings) => {
            exit(block_on(events::run(args, settings)).flatten(), USAGE)
        }
        Command::Client(client) => run_client(client),
        Command::CheckConfig(loaded) => {
            let text = || {
                config::to_toml(
                    &loaded.settings,
                    &loaded.origins,
                    app::PROPERTY_RULES.is_secret,
                )
            };
            config::without_effect(&loaded)
                .iter()
                .for_each(|line| say(format_args!("taskd: warning: {line}")));
            exit(
                check(&loaded).and_then(|()| Ok(print(text().trim_end())?)),
                USAGE,
            )
        }
    }
}

fn run_client(client: Client) -> ExitCode {
    match client {
        Client::Pause(args) => exit(block_on(change::pause(args)).flatten(), USAGE),
        Client::Resume(args) => exit(block_on(change::resume(args)).flatten(), USAGE),
        Client::Limits(args) => exit(block_on(limits::run(args)).flatten(), USAGE),
        Client::Stats(args) => exit(block_on(stats::run(args)).flatten(), USAGE),
        Client::Fsck(args) => exit_as(block_on(fsck::run(args))),
        Client::Dump(args) => exit(block_on(dump::run(args)).flatten(), USAGE),
        Client::Top(args) => exit(block_on(top::run(args)).flatten(), USAGE),
        Client::Books(args) => exit_as(block_on(books::run(args))),
        Client::Completions(completions) => exit(completions.print(command_line()), 1),
        Client::Man(man) => exit(man.write(command_line()), 1),
        Client::Insert(args) => match block_on(insert::run(*args)) {
            Ok(Ok(summary)) if summary.rejected > 0 || summary.not_completed.unwrap_or(0) > 0 => {
                ExitCode::from(1)
            }
            Ok(result) => exit(result.map(drop), USAGE),
            Err(error) => exit(Err(error), 1),
        },
        Client::Work(args) => {
            let ready = if args.stop_with_stdin {
                stop_with(std::io::stdin())
            } else {
                Ok(())
            };
            let worked = ready.and_then(|()| block_on(work::run(*args)).flatten());
            exit(worked, USAGE)
        }
        Client::Load(args) => exit_as(block_on(load::run(args))),
        Client::Tasks(args) => exit_as(block_on(tasks::run(*args))),
        Client::Bulk(args) => exit_as(block_on(bulk::run(args))),
        Client::Dead(args) => exit_as(block_on(dead::run(args))),
        Client::Task(args) => exit_as(block_on(task::run(args))),
        Client::Subscription(args) => exit_as(block_on(subscription::run(args))),
        Client::Topic(args) => exit_as(block_on(topic::run(args))),
        Client::Topology(args) => exit_with(block_on(topology::run(args))),
        Client::Workflow(args) => exit_with(block_on(workflow::run(args))),
        Client::Execution(args) => exit_with(block_on(execution::run(args))),
        Client::Tree(args) => exit_as(block_on(tree::run(args))),
        Client::Watch(args) => exit_as(block_on(watch::run(args))),
        Client::Workers(args) => exit(block_on(workers::workers(args)).flatten(), USAGE),
        Client::Processes(args) => exit(block_on(workers::processes(args)).flatten(), USAGE),
        Client::Wait(args) => exit_as(block_on(wait::run(args))),
        Client::Explain(args) => exit_as(block_on(explain::run(args))),
        Client::Cancel(args) => exit_as(block_on(change::cancel(args))),
        Client::Change(args) => exit_as(block_on(change::change(args))),
        Client::Requeue(args) => exit_as(block_on(change::requeue(args))),
        Client::Bench(args) => exit_as(block_on(bench::run(args))),
    }
}

/// Checks the settings that only a backend can judge. The error begins with where the wrong setting
/// comes from.
fn check(loaded: &Loaded) -> anyhow::Result<()> {
    app::check(&loaded.settings).map_err(|error| {
        let said = in_short(&*error);
        anyhow!("{}{said}", loaded.origins.place(&said))
    })
}

/// Returns the exit code of a command that returns whether all went well.
fn exit_as(result: anyhow::Result<anyhow::Result<bool>>) -> ExitCode {
    match result {
        Ok(Ok(false)) => ExitCode::from(1),
        Ok(result) => exit(result.map(drop), USAGE),
        Err(error) => exit(Err(error), 1),
    }
}

/// Returns the exit code of a command that returns its own.
fn exit_with(result: anyhow::Result<anyhow::Result<u8>>) -> ExitCode {
    match result {
        Ok(Ok(code)) if code != 0 => ExitCode::from(code),
        other => exit_as(other.map(|result| result.map(|_| true))),
    }
}

fn exit(result: anyhow::Result<()>, code_of_failure: u8) -> ExitCode {
    logging::finish();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.downcast_ref().is_some_and(Unwritten::is_closed) => ExitCode::SUCCESS,
        Err(error) => {
            // Keep line breaks: a message may contain the last lines of a log.
            let lines: Vec<_> = in_short(&*error).split('\n').map(printable).collect();
            say(format_args!("taskd: {}", lines.join("\n")));
            let stopped = error.downcast_ref().map(insert::Stopped::exit_code);
            ExitCode::from(match stopped {
                Some(code) => code,
                None if error.is::<NeverRan>() => USAGE,
                None if error.is::<NotThere>() => 1,
                None => code_of_failure,
            })
        }
    }
}

/// Sends SIGTERM to this process when `input` ends. The kernel closes a pipe however its writer
/// dies.
fn stop_with(mut input: impl Read + Send + 'static) -> anyhow::Result<()> {
    let wait = move || {
        // A read error counts as the end, too.
        drop(std::io::copy(&mut input, &mut std::io::sink()));
        kill(Pid::this(), Signal::SIGTERM).ok();
    };
    let thread = std::thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(wait);
    thread.context("cannot start a thread").map(drop)
}

fn with_logging(settings: &Settings) -> anyhow::Result<()> {
    Ok(logging::init(&settings.log, settings.log_format)?)
}

fn block_on<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let runtime = runtime.context("cannot start the runtime")?;
    // Box the future, because `block_on` would be compiled again for each type of future.
    let future: Pin<Box<dyn Future<Output = T> + '_>> = Box::pin(future);
    let result = runtime.block_on(future);
    // Do not wait for a thread that is still blocked, for example in a call to a broker that does
    // not answer.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(result)
}
