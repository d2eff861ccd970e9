//! Lua scripts, calls of them, and batches of several commands in one round trip.

use std::{sync::LazyLock, time::Instant};

use futures::StreamExt;
use redis::{
    Arg, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, ToRedisArgs, Value,
    aio::ConnectionLike,
};

use crate::telemetry::metrics;

/// The most commands in flight if each needs a round trip of its own.
const AT_ONCE: usize = 64;

/// A file of `lua/`, after the libraries that it uses: one text for Redis, with one SHA.
pub struct Script {
    /// The name of its file, and its label in metrics.
    pub name: &'static str,
    pub(super) code: LazyLock<String>,
    pub(super) sha: LazyLock<String>,
    /// `None` if the script does not belong to a shard.
    pub(super) of_shard: Option<OfShard>,
}

/// The keys of a shard, by the names that scripts call them; `lua/README.md` describes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardKey {
    GENERATION,
    RECORDS,
    BODIES,
    LEASES,
    DELAYED,
    COUNTERS,
    OUTBOX,
    FINALS,
    OFFSET,
    UNDELIVERED,
    LIMITS,
    LINES,
    STARTS,
    CROWDED,
}

/// The keys of a shard that a script gets.
#[derive(Clone, Copy, Debug)]
pub struct OfShard {
    pub keys: &'static [ShardKey],
    /// Whether the keys of the lanes follow.
    pub lanes: bool,
}

/// The approximate length of a key, in bytes.
const KEY_BYTES: usize = 40;

impl Script {
    pub fn call<K: ToRedisArgs>(&'static self, keys: &[K]) -> Call {
        // Allocates enough for the keys and a few arguments at once: otherwise a call with thirty
        // keys allocates eleven times.
        let mut command = Cmd::with_capacity(keys.len() + 16, KEY_BYTES * keys.len() + 256);
        command
            .arg("EVALSHA")
            .arg(self.sha.as_str())
            .arg(keys.len())
            .arg(keys);
        Call {
            script: self,
            command,
            items: 1,
        }
    }

    /// The digest under which Redis caches the script.
    pub fn sha(&self) -> &str {
        &self.sha
    }

    pub fn of_shard(&self) -> Option<OfShard> {
        self.of_shard
    }

    fn in_full(&self, command: &Cmd) -> Cmd {
        let mut full = Cmd::new();
        full.arg("EVAL").arg(self.code.as_str());
        for arg in command.args_iter().skip(2) {
            if let Arg::Simple(bytes) = arg {
                full.arg(bytes);
            }
        }
        full
    }

    fn measure(&self, items: usize, began: Instant) {
        metrics::redis_script(self.name, items, began.elapsed());
    }
}

/// A script with its keys and arguments.
pub struct Call {
    script: &'static Script,
    command: Cmd,
    items: usize,
}

impl Call {
    pub fn arg(&mut self, value: impl ToRedisArgs) -> &mut Self {
        self.command.arg(value);
        self
    }

    /// Adds the time, the first argument of scripts that need it. With `None`, the script uses the
    /// clock of Redis.
    pub fn now(mut self, unix_ms: Option<i64>) -> Self {
        match unix_ms {
            Some(now) => self.command.arg(now),
            None => self.command.arg(""),
        };
        self
    }

    /// Sets how many callers' items the call combines, for the metrics.
    pub fn of_items(mut self, items: usize) -> Self {
        self.items = items;
        self
    }

    /// Runs the script. A server that does not know it (new, restarted, flushed, another node of
    /// the cluster) is sent its text, and caches it.
    pub async fn run(&self, conn: &mut impl ConnectionLike) -> RedisResult<Value> {
        let began = Instant::now();
        let answer = match self.command.query_async(conn).await {
            Err(error) if is_unknown(&error) => {
                self.script.in_full(&self.command).query_async(conn).await
            }
            other => other,
        };
        self.script.measure(self.items, began);
        answer
    }
}

fn is_unknown(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Commands and scripts for one round trip, in order.
#[derive(Default)]
pub struct Batch {
    commands: Vec<Cmd>,
    scripts: Vec<Placed>,
}

/// A script among the commands.
#[derive(Clone, Copy)]
struct Placed {
    place: usize,
    script: &'static Script,
    items: usize,
    /// The script may run twice.
    is_repeatable: bool,
}

impl Batch {
    pub fn script(&mut self, call: Call) {
        self.place(call, false);
    }

    /// Adds a script that may run twice, as a command may.
    pub fn repeatable(&mut self, call: Call) {
        self.place(call, true);
    }

    fn place(
        &mut self,
        Call {
            script,
            command,
            items,
        }: Call,
        is_repeatable: bool,
    ) {
        self.scripts.push(Placed {
            place: self.commands.len(),
            script,
            items,
            is_repeatable,
        });
        self.commands.push(command);
    }

    /// Adds a plain command. It runs again if the server does not know a script before it.
    pub fn command(&mut self, command: Cmd) {
        self.commands.push(command);
    }

    pub(super) fn len(&self) -> usize {
        self.commands.len()
    }

    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Runs all commands, and returns an answer for each. If the server does not know a script,
    /// that script and everything after it run in a second round trip, except scripts that have run
    /// already and may not run twice.
    pub async fn run(self, conn: &mut impl ConnectionLike) -> RedisResult<Vec<RedisResult<Value>>> {
        let began = Instant::now();
        let mut pipe = Pipeline::with_capacity(self.commands.len());
        for command in self.commands {
            pipe.add_command(command);
        }
        let mut answers: Vec<RedisResult<Value>> = pipe.ignore_errors().query_async(conn).await?;
        let is_missed =
            |placed: &&Placed| matches!(&answers[placed.place], Err(error) if is_unknown(error));
        if let Some(first) = self.scripts.iter().find(is_missed) {
            let (places, mut rest) = missed(&pipe, &self.scripts, first.place, &answers);
            let again: Vec<RedisResult<Value>> = rest.ignore_errors().query_async(conn).await?;
            for (place, answer) in places.into_iter().zip(again) {
                answers[place] = answer;
            }
        }
        for same in self
            .scripts
            .chunk_by(|a, b| std::ptr::eq(a.script, b.script))
        {
            same[0]
                .script
                .measure(same.iter().map(|placed| placed.items).sum(), began);
        }
        Ok(answers)
    }

    /// Runs each command in a round trip of its own, and returns an answer for each.
    pub(super) async fn run_apart(
        self,
        conn: &(impl ConnectionLike + Clone),
    ) -> Vec<RedisResult<Value>> {
        let mut scripts = self.scripts.into_iter().peekable();
        let each = self
            .commands
            .into_iter()
            .enumerate()
            .map(|(place, command)| {
                let script = scripts.next_if(|placed| placed.place == place);
                let mut conn = conn.clone();
                async move {
                    let answer = match script {
                        Some(Placed { script, items, .. }) => {
                            Call {
                                script,
                                command,
                                items,
                            }
                            .run(&mut conn)
                            .await
                        }
                        None => command.query_async(&mut conn).await,
                    };
                    (place, answer)
                }
            });
        let mut answers: Vec<_> = futures::stream::iter(each)
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        answers.sort_unstable_by_key(|(place, _)| *place);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// Like [`Self::run`], but fails with the first error of a command.
    pub async fn run_all(self, conn: &mut impl ConnectionLike) -> RedisResult<Vec<Value>> {
        self.run(conn).await?.into_iter().collect()
    }
}

/// Returns the commands to run again, from `first` on, and their indexes.
fn missed(
    pipe: &Pipeline,
    scripts: &[Placed],
    first: usize,
    answers: &[RedisResult<Value>],
) -> (Vec<usize>, Pipeline) {
    let mut places = Vec::new();
    let mut rest = Pipeline::new();
    for (place, command) in pipe.cmd_iter().enumerate().skip(first) {
        match scripts.iter().find(|placed| placed.place == place) {
            Some(placed) if answers[place].as_ref().is_err_and(is_unknown) => {
                rest.add_command(placed.script.in_full(command));
            }
            Some(Placed {
                is_repeatable: false,
                ..
            }) => continue,
            _ => {
                rest.add_command(command.clone());
            }
        }
        places.push(place);
    }
    (places, rest)
}
