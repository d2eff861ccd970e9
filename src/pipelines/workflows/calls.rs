//! Sends the HTTP requests of workflows.
//!
//! A request is a task of queue [`HTTP_QUEUE`], and this is its worker, so leases, attempts and
//! histories are those of any task. Crash windows:
//!
//! - Before the request is sent, or before its answer is reported: the lease ends, and the request is
//!   sent again, with the same body and the same `Idempotency-Key`.
//! - The report is lost: the same.
//!
//! Only a request that found no connection is tried again by the queue: nothing was sent. Any other
//! failure is an error of the workflow at once, which may retry it under another key.

mod answer;
mod hosts;
mod request;

use std::{pin::pin, time::Duration};

use futures::{
    FutureExt as _, StreamExt as _,
    future::{BoxFuture, OptionFuture},
    stream::FuturesUnordered,
};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use self::{
    hosts::{ALL_AT_ONCE, Hosts},
    request::{End, Request},
};
use crate::{
    config::Settings,
    model::{
        Completion, Encoding, Extension, GetTasks, HTTP_QUEUE, Item, ItemAnswer, ItemStatus,
        LeasedTask, LimitReport, QueueName, Rejection, shorten,
    },
    outbound::{Failure, Outbound, Permit},
    pipelines::{
        context::Context,
        tasks::{self, Handle, Leases},
    },
    runtime::{Loop, Supervisor},
    workflow::machine::{Problem, ProblemKind},
};

/// Each task is for one worker, so that of all processes may have one name.
const WORKER: &str = "taskd";
/// How long to wait for tasks, and before asking again after an error.
const WAIT: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_secs(1);
/// How long a server may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(300);
/// How long requests may take to end at a stop, at most.
const END_WITHIN: Duration = Duration::from_secs(5);
const GIVE_BACK_WITHIN: Duration = Duration::from_secs(1);
/// How often a report is tried that finds no room in Redis.
const TRIES: usize = 10;
/// The most bytes of what an error says: a reason has at most 4096, and JSON may take six for one.
const DETAIL_BYTES: usize = 500;

/// Starts the loop.
pub fn start_calls(context: &Context, tasks: Handle, supervisor: &Supervisor) {
    let caller = Caller {
        tasks,
        outbound: context.outbound.clone(),
        most: context.settings.limits.max_result_bytes,
        end_within: END_WITHIN.min(context.settings.grace_period / 4),
        wait: wait(&context.settings),
        hosts: Hosts::default(),
    };
    supervisor.spawn_loop("workflow/calls", caller, |caller, cx| async move {
        caller.run(&cx).await;
    });
}

fn wait(settings: &Settings) -> Duration {
    WAIT.min(settings.limits.max_wait).max(AGAIN)
}

#[derive(Clone)]
struct Caller {
    tasks: Handle,
    outbound: Outbound,
    /// The most bytes of an answer.
    most: usize,
    end_within: Duration,
    wait: Duration,
    hosts: Hosts,
}

impl Caller {
    async fn run(self, cx: &Loop) {
        let Ok(queue) = QueueName::new(HTTP_QUEUE) else {
            return;
        };
        let let_go = CancellationToken::new();
        let mut calls = FuturesUnordered::new();
        let mut getting: Option<BoxFuture<'_, Result<Leases, tasks::Error>>> = None;
        while !cx.is_stopped() {
            let free = ALL_AT_ONCE - calls.len();
            if getting.is_none() && free > 0 {
                getting = Some(self.get(&queue, free).boxed());
            }
            let step = async {
                tokio::select! {
                    biased;
                    () = cx.stop.cancelled() => None,
                    Some(()) = calls.next(), if !calls.is_empty() => None,
                    Some(leased) = OptionFuture::from(getting.as_mut()), if getting.is_some() => Some(leased),
                }
            };
            match cx.idle(step).await {
                None => {}
                Some(Ok(leases)) => {
                    getting = None;
                    for task in leases.deliver() {
                        calls.push(self.work(task, &let_go).boxed());
                    }
                }
                Some(Err(error)) => {
                    tracing::debug!("cannot get requests to send: {error}");
                    let again = self.get(&queue, free);
                    getting = Some(async { sleep(AGAIN).then(|()| again).await }.boxed());
                }
            }
            cx.beat();
        }
        // What it has leased meanwhile goes back.
        drop(getting);
        let end = async |calls: &mut FuturesUnordered<_>, within| {
            let all = async { while calls.next().await.is_some() {} };
            timeout(within, all).await.is_ok()
        };
        if !end(&mut calls, self.end_within).await {
            let_go.cancel();
            end(&mut calls, GIVE_BACK_WITHIN).await;
        }
    }

    async fn get(&self, queue: &QueueName, most: usize) -> Result<Leases, tasks::Error> {
        let request = GetTasks {
            worker: WORKER.to_owned(),
            max_tasks: u32::try_from(most).unwrap_or(1),
            wait: self.wait,
            ..GetTasks::default()
        };
        self.tasks.get_own(queue.clone(), request).await
    }

    /// Sends the request of a task, and reports what became of it.
    async fn work(&self, task: LeasedTask, let_go: &CancellationToken) {
        let mut sending = pin!(self.send(&task));
        let end = loop {
            tokio::select! {
                end = &mut sending => break end,
                () = sleep(task.lease / 3) => {
                    if !self.extend(&task).await {
                        return;
                    }
                }
                // Another process sends it, under the same key.
                () = let_go.cancelled() => break End::PutOff(Duration::ZERO),
            }
        };
        self.report(&task, end).await;
    }

    /// Returns false if the task is not for this process any more.
    async fn extend(&self, task: &LeasedTask) -> bool {
        let by = Some(task.lease);
        let extended = self
            .tasks
            .extend(WORKER, vec![item(task, Extension { by })]);
        let lost = |status| !matches!(status, ItemStatus::Ok | ItemStatus::TryLater);
        match extended.await {
            Ok(answers) => !answers.iter().any(|answer| lost(answer.status)),
            Err(_) => true,
        }
    }

    async fn send(&self, task: &LeasedTask) -> End {
        let mut request = match Request::read(task, &self.outbound) {
            Ok(request) => request,
            Err(end) => return end,
        };
        let host = self.hosts.of(&request.outgoing.url);
        let Some(mut place) = host.place() else {
            return End::PutOff(host.later());
        };
        let Some(permit) = host.breaker.permit(Instant::now().into_std()) else {
            let why =
                "its last requests found no connection or no answer, so none is sent for a moment";
            return End::NotConnected(request.failed(503, why));
        };
        place.sent();
        let sending = self.outbound.send(request.outgoing.clone(), self.most);
        let sent = timeout(ANSWER_WITHIN, Box::pin(sending)).await;
        let failed = |permit: Permit<'_>, why: &str| {
            let turned = permit.failed(Instant::now().into_std());
            host.turned(turned, why);
        };
        match sent {
            Ok(Ok(answer)) => {
                host.turned(permit.succeeded(), "");
                request.end(answer, self.most)
            }
            Ok(Err(Failure::TooLarge)) => {
                host.turned(permit.succeeded(), "");
                let why = format!(
                    "the answer has more than {} bytes (max_result_bytes)",
                    self.most
                );
                End::Failed(request.failed(500, &why))
            }
            Ok(Err(Failure::Refused(why))) => {
                End::Failed(Problem::new(ProblemKind::Authorization, "", why))
            }
            Ok(Err(Failure::NotConnected(why))) => {
                failed(permit, &why);
                End::NotConnected(request.failed(503, &why))
            }
            Ok(Err(Failure::Failed(why))) => {
                failed(permit, &why);
                End::Failed(request.failed(502, &why))
            }
            Err(_) => {
                let within = humantime::format_duration(ANSWER_WITHIN);
                let why = format!("no answer within {within}");
                failed(permit, &why);
                End::Failed(request.failed(504, &why))
            }
        }
    }

    /// Reports, and repeats what finds no room in Redis. If the lease has ended, the request is sent
    /// again.
    async fn report(&self, task: &LeasedTask, mut end: End) {
        for _ in 0..TRIES {
            let answers = match &end {
                End::Answered(result) => {
                    let completion = Completion {
                        result: result.clone(),
                        result_encoding: Encoding::Json,
                        ..Completion::default()
                    };
                    self.tasks
                        .complete(WORKER, vec![item(task, completion)])
                        .await
                }
                End::Failed(problem) => self.reject(task, reason(problem), false, None).await,
                End::NotConnected(problem) => self.reject(task, reason(problem), true, None).await,
                End::PutOff(delay) => self.reject(task, String::new(), true, Some(*delay)).await,
                End::Wrong(why) => self.reject(task, why.clone(), false, None).await,
            };
            match answers {
                Ok(answers) => match answers.first() {
                    Some(answer) if answer.status == ItemStatus::TryLater => {}
                    Some(answer) if answer.status == ItemStatus::Invalid => {
                        let why = format!("the answer is no result: {}", answer.error);
                        if matches!(end, End::Wrong(_)) {
                            tracing::warn!("cannot report a request: {why}");
                            return;
                        }
                        end = End::Wrong(shorten(&why, DETAIL_BYTES).into_owned());
                        continue;
                    }
                    _ => return,
                },
                Err(error) => tracing::debug!("cannot report a request: {error}"),
            }
            sleep(AGAIN).await;
        }
    }

    async fn reject(
        &self,
        task: &LeasedTask,
        reason: String,
        retry: bool,
        put_off: Option<Duration>,
    ) -> Result<Vec<ItemAnswer>, tasks::Error> {
        let rejection = Rejection {
            reason,
            retry,
            delay: put_off,
            not_started: put_off.is_some(),
            limit: LimitReport::default(),
        };
        self.tasks.reject(WORKER, vec![item(task, rejection)]).await
    }
}

/// The reason of a rejection that the workflow reads as an error.
fn reason(problem: &Problem) -> String {
    let detail = problem.detail.as_deref().unwrap_or_default();
    let problem = Problem {
        detail: Some(shorten(detail, DETAIL_BYTES).into_owned()),
        // The workflow knows the task, whose path may be long.
        instance: None,
        ..problem.clone()
    };
    problem.to_value().to_string()
}

fn item<T>(task: &LeasedTask, report: T) -> Item<T> {
    Item {
        id: task.id.to_string(),
        lease_token: task.token.to_string(),
        report: Ok(report),
    }
}
