//! A worker and its options.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use bytes::Bytes;

use crate::{
    client::Client,
    error::Error,
    event::{Event, Summary, say, say_on_stderr},
    options::{Next, Options},
    outcome::{Done, Failure},
    run::{Handler, Run},
    session::Session,
    source::Source,
    stop::Stop,
    surplus::Surplus,
    task::{CancelOnDrop, FromPayload, Task, TaskInfo},
    unary::Unary,
};

/// Calls a handler for each task that it receives.
#[must_use]
pub struct Worker {
    name: String,
    queues: Vec<String>,
    weights: HashMap<String, u32>,
    wait: Duration,
    is_polling: bool,
    /// True if the caller has set no event handler. The worker then prints the most important
    /// events on stderr.
    says: bool,
    pub(crate) options: Options,
}

impl Worker {
    /// Creates a worker of these queues. taskd never leases a task to the same name twice at a
    /// time, and credits each name once per task, so each process of a fleet needs a name of its
    /// own.
    pub fn new(
        name: impl Into<String>,
        queues: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        let options = Options {
            concurrency: 1,
            prefetch: 0,
            lease: Duration::from_secs(30),
            time_limit: Duration::from_secs(3600),
            drain_limit: Duration::from_secs(30),
            has_signals: false,
            stop: Stop::default(),
            tell: say_on_stderr(),
            around: Vec::new(),
            surplus: None,
        };
        let queues = queues.into_iter().map(Into::into).collect();
        Self {
            name: name.into(),
            queues,
            weights: HashMap::new(),
            wait: Duration::from_secs(20),
            is_polling: false,
            says: true,
            options,
        }
    }

    /// Lets the queues share the tasks by weight while each has some: with 3 for `a` and 1 for `b`
    /// three of four tasks are of `a`. 1 to 1,000; a queue without one has 1. Then priorities order
    /// the tasks of each queue, and not those of different ones.
    pub fn weight(mut self, queue: impl Into<String>, weight: u32) -> Self {
        self.weights.insert(queue.into(), weight);
        self
    }

    /// How many handlers run concurrently. 1 by default.
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.options.concurrency = concurrency.max(1);
        self
    }

    /// How many tasks wait in this process, so that a handler that ends can continue with the next
    /// one immediately. 0 by default: a waiting task could run elsewhere, and if this process is
    /// killed, it loses an attempt.
    pub fn prefetch(mut self, prefetch: usize) -> Self {
        self.options.prefetch = prefetch;
        self
    }

    /// The duration of leases; the worker extends them three times as often. It also determines how
    /// long the worker may be silent before others get its tasks: on a stream half of it, limited
    /// to 2 s to 10 min; with polls all of it. 30 s by default.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = lease.max(Duration::from_millis(300));
        self
    }

    /// Gets tasks by long polls instead of a stream on which taskd sends them. The worker also does
    /// so by itself if taskd is too old for streams.
    pub fn poll(mut self) -> Self {
        self.is_polling = true;
        self
    }

    /// How long taskd holds a poll that finds no task. 20 s by default.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// How long a handler may run before it is dropped and its task rejected. An hour by default.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.options.time_limit = limit;
        self
    }

    /// How long a drain may take before the worker stops now. 30 s by default.
    pub fn drain_limit(mut self, limit: Duration) -> Self {
        self.options.drain_limit = limit;
        self
    }

    /// Drains at the first SIGINT (Ctrl-C) or SIGTERM, and stops now at the second.
    pub fn stop_on_signals(mut self) -> Self {
        self.options.has_signals = true;
        self
    }

    /// Calls `tell` with every event. It must not block. Without it, the worker prints on stderr
    /// where it takes tasks from, which attempts failed, and when taskd is unavailable;
    /// `on_event(|_| ())` makes it silent.
    pub fn on_event(mut self, tell: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        self.options.tell = Arc::new(tell);
        self.says = false;
        self
    }

    /// Wraps each run of the handler, to do something before and after it; the first wrap is the
    /// outermost. The time limit holds for all of them.
    ///
    /// ```
    /// # use taskd_client::{Mock, NewTask, Task, Worker};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), taskd_client::Error> {
    /// let worker = Worker::new("w", ["q"]).around(|task, next| async move {
    ///     let began = std::time::Instant::now();
    ///     let outcome = next.await;
    ///     println!("{} took {:?}, {}", task.key(), began.elapsed(), outcome.is_ok());
    ///     outcome
    /// });
    /// # let mock = Mock::new([NewTask::new("q", "a")]);
    /// # worker.run_on(mock, async |_: Task| Ok::<_, taskd_client::Failure>(())).await.map(drop)
    /// # }
    /// ```
    pub fn around<F>(
        mut self,
        wrap: impl Fn(Arc<TaskInfo>, Next) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Done, Failure>> + Send + 'static,
    {
        self.options
            .around
            .push(Arc::new(move |task, next| Box::pin(wrap(task, next))));
        self
    }

    /// Returns a handle that stops this worker from elsewhere.
    pub fn stop(&self) -> Stop {
        self.options.stop.clone()
    }

    /// Works until it is stopped or taskd refuses a call, for example because the token is invalid.
    pub async fn run<P, H, F, D, E>(mut self, client: &Client, handler: H) -> Result<Summary, Error>
    where
        P: FromPayload,
        H: Fn(Task<P>) -> F + Send + Sync + 'static,
        F: Future<Output = Result<D, E>> + Send + 'static,
        D: Into<Done> + 'static,
        E: Into<Failure> + 'static,
    {
        if self.says {
            let addresses = client.servers().addresses().join(", ");
            let (name, queues) = (&self.name, self.queues.join(", "));
            say(&format!(
                "worker {name} takes tasks of {queues} from {addresses}"
            ));
        }
        self.options.surplus = Some(Surplus::new(client.clone(), self.options.tell.clone()));
        let lease = self.options.lease;
        let polls =
            Unary::new(client, &self.name, &self.queues, self.wait, lease).weights(&self.weights);
        if self.is_polling {
            return self.run_on(polls, handler).await;
        }
        let tell = self.options.tell.clone();
        let (name, weights) = (&self.name, &self.weights);
        let session = Session::new(client, name, &self.queues, weights, lease, polls, tell);
        self.run_on(session, handler).await
    }

    /// Works on tasks from another source, for example a [`Mock`](crate::Mock) in tests.
    pub async fn run_on<S, P, H, F, D, E>(mut self, source: S, handler: H) -> Result<Summary, Error>
    where
        S: Source,
        P: FromPayload,
        H: Fn(Task<P>) -> F + Send + Sync + 'static,
        F: Future<Output = Result<D, E>> + Send + 'static,
        D: Into<Done> + 'static,
        E: Into<Failure> + 'static,
    {
        let limit = self.options.time_limit;
        let handler = Arc::new(handler);
        let surplus = self.options.surplus.take().map(Arc::new);
        let around: Arc<[_]> = std::mem::take(&mut self.options.around).into();
        let erased: Handler = Box::new(move |info: &Arc<TaskInfo>, payload: Bytes| {
            let (handler, info, surplus) = (handler.clone(), info.clone(), surplus.clone());
            let around = around.clone();
            Box::pin(async move {
                let cancel = CancelOnDrop::new(info.clone());
                let task = Task::new(info.clone(), payload)
                    .map_err(|why| Failure::new(why).never_again())?;
                // The closure itself runs inside of the hooks, too.
                let work = async move { handler(task).await.map(Into::into).map_err(Into::into) };
                let ended = if around.is_empty() {
                    tokio::time::timeout(limit, work).await
                } else {
                    let mut next: Next = Box::pin(work);
                    for wrap in around.iter().rev() {
                        next = wrap(info.clone(), next);
                    }
                    tokio::time::timeout(limit, next).await
                };
                let outcome: Result<Done, Failure> = match ended {
                    Ok(outcome) => {
                        cancel.ended();
                        outcome
                    }
                    Err(_) => Err(Failure::new(format!("it took longer than {limit:?}"))),
                };
                match (outcome, surplus) {
                    (Ok(done), Some(surplus)) => surplus.insert(&info, done).await,
                    (outcome, _) => outcome,
                }
            })
        });
        Box::pin(Run::new(source, erased, self.options).run()).await
    }
}
