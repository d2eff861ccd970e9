//! The Lua scripts, and one call of one.

use std::sync::LazyLock;

use redis::{Arg, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, ToRedisArgs, Value};

use super::{
    Error,
    keys::{ShardKeys, WITHOUT_LANES},
};
use crate::redis_pool::{Connection, Durability};

/// One file of `lua/` behind its head. What Redis runs is one text with one SHA.
pub struct Script {
    pub name: &'static str,
    code: &'static str,
    /// Whether it gets the keys of the lanes.
    lanes: bool,
    sha: LazyLock<String>,
}

/// `allow_oom`: a full Redis runs the script too, because it frees memory, or because a script that frees memory depends on it.
macro_rules! shebang {
    (allow_oom) => {
        "#!lua flags=allow-oom\n"
    };
    (as_written) => {
        ""
    };
}

macro_rules! head {
    (none) => {
        ""
    };
    (shard) => {
        include_str!("../../lua/lib/shard.lua")
    };
    (ending) => {
        concat!(include_str!("../../lua/lib/shard.lua"), include_str!("../../lua/lib/ending.lua"))
    };
}

macro_rules! script {
    ($constant:ident, $name:literal, $head:ident, $memory:ident, lanes: $lanes:literal) => {
        pub static $constant: Script = Script {
            name: $name,
            code: concat!(shebang!($memory), head!($head), include_str!(concat!("../../lua/", $name, ".lua"))),
            lanes: $lanes,
            sha: LazyLock::new(|| redis::Script::new($constant.code).get_hash().to_owned()),
        };
    };
}

script!(OPEN, "open", none, allow_oom, lanes: true);
script!(CLOSE, "close", shard, allow_oom, lanes: true);
script!(ENQUEUE, "enqueue", shard, as_written, lanes: true);
// Enqueues nothing, only moves the offset past parked tasks.
script!(PASS, "enqueue", shard, allow_oom, lanes: true);
script!(REWIND, "rewind", shard, allow_oom, lanes: false);
script!(CLAIM, "claim", shard, as_written, lanes: true);
script!(CLAIM_AT_FULL_MEMORY, "claim", shard, allow_oom, lanes: true);
script!(DELIVERED, "delivered", shard, allow_oom, lanes: false);
script!(COMPLETE, "complete", shard, allow_oom, lanes: false);
script!(REJECT, "reject", ending, allow_oom, lanes: true);
script!(EXTEND, "extend", shard, allow_oom, lanes: false);
script!(EXPIRE, "expire", ending, allow_oom, lanes: true);
script!(PROMOTE, "promote", ending, allow_oom, lanes: true);
script!(SWEEP, "sweep", shard, allow_oom, lanes: true);
script!(LOOK, "look", shard, as_written, lanes: true);
script!(PEEK, "peek", shard, as_written, lanes: true);
script!(INSPECT, "inspect", shard, as_written, lanes: false);
script!(STATS, "stats", shard, as_written, lanes: true);
script!(FINALS, "finals", shard, allow_oom, lanes: false);
script!(FORGET, "forget", shard, allow_oom, lanes: false);
script!(OUTBOX, "outbox", shard, allow_oom, lanes: false);
script!(FORWARDED, "forwarded", shard, allow_oom, lanes: false);

impl Script {
    /// A call on a shard. `now_ms` only in tests: Redis's own clock counts, so that a process with a wrong one does no harm.
    pub fn on(&'static self, keys: &ShardKeys, now_ms: Option<i64>) -> Call {
        let keys = if self.lanes { keys.all() } else { &keys.all()[..WITHOUT_LANES] };
        let mut command = Cmd::new();
        command.arg("EVALSHA").arg(self.sha.as_str()).arg(keys.len()).arg(keys);
        match now_ms {
            Some(now) => command.arg(now),
            None => command.arg(""),
        };
        Call { script: self, command }
    }
}

/// A script with its keys and arguments.
pub struct Call {
    script: &'static Script,
    command: Cmd,
}

impl Call {
    pub fn arg(&mut self, value: impl ToRedisArgs) -> &mut Self {
        self.command.arg(value);
        self
    }

    /// Runs it. A server that does not know the script (new, restarted, flushed, another node of the cluster) is taught it by the same call:
    /// the keys lead it there.
    pub async fn run(&self, conn: &mut Connection) -> Result<Value, RedisError> {
        match self.command.query_async(conn).await {
            Err(error) if is_unknown(&error) => self.in_full().query_async(conn).await,
            other => other,
        }
    }

    /// Runs it and waits, in the same exchange, until what it wrote is as durable as asked. `key`: one of the shard that anybody may write.
    pub(super) async fn run_durably(
        &self,
        conn: &mut Connection,
        durability: &Durability,
        key: &str,
    ) -> Result<Value, Error> {
        match durably(self.command.clone(), conn, durability, key).await {
            Err(Error::Redis(error)) if is_unknown(&error) => durably(self.in_full(), conn, durability, key).await,
            other => other,
        }
    }

    fn in_full(&self) -> Cmd {
        let mut command = Cmd::new();
        command.arg("EVAL").arg(self.script.code);
        for arg in self.command.args_iter().skip(2) {
            if let Arg::Simple(bytes) = arg {
                command.arg(bytes);
            }
        }
        command
    }
}

fn is_unknown(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

async fn durably(command: Cmd, conn: &mut Connection, durability: &Durability, key: &str) -> Result<Value, Error> {
    let mut pipe = Pipeline::with_capacity(3);
    pipe.add_command(command);
    durability.ask(&mut pipe, key);
    let answers: Vec<RedisResult<Value>> = pipe.ignore_errors().query_async(conn).await?;
    let mut answers = answers.into_iter().collect::<RedisResult<Vec<_>>>()?;
    let waited = answers.pop().unwrap_or(Value::Nil);
    durability.judge(&waited)?;
    Ok(answers.swap_remove(0))
}
