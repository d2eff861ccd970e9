//! The Lua scripts, and one call of one.

use std::sync::LazyLock;

use redis::{Arg, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, ToRedisArgs, Value};

use super::{
    Error,
    keys::{ShardKeys, WITHOUT_LANES},
};
use crate::redis_pool::{Connection, Durability};

/// One file of `lua/` behind the head that all share (but [`OPEN`]). What Redis runs is one text with one SHA.
pub struct Script {
    pub name: &'static str,
    code: &'static str,
    lanes: bool,
    sha: LazyLock<String>,
}

/// `oom: allow`: a full Redis runs the script too, because it frees memory, or because a script that frees memory
/// depends on it.
macro_rules! script {
    ($constant:ident, $name:literal, lanes: $lanes:literal, oom: allow) => {
        script!(
            $constant,
            $name,
            lanes: $lanes,
            head: concat!(
                "#!lua flags=allow-oom\n",
                include_str!("../../lua/lib/shard.lua"),
                include_str!("../../lua/lib/ending.lua")
            )
        );
    };
    ($constant:ident, $name:literal, lanes: $lanes:literal) => {
        script!(
            $constant,
            $name,
            lanes: $lanes,
            head: concat!(include_str!("../../lua/lib/shard.lua"), include_str!("../../lua/lib/ending.lua"))
        );
    };
    ($constant:ident, $name:literal, lanes: $lanes:literal, head: $head:expr) => {
        pub static $constant: Script = Script {
            name: $name,
            code: concat!($head, include_str!(concat!("../../lua/", $name, ".lua"))),
            lanes: $lanes,
            sha: LazyLock::new(|| redis::Script::new($constant.code).get_hash().to_owned()),
        };
    };
}

script!(OPEN, "open", lanes: true, head: "#!lua flags=allow-oom\n");
script!(ENQUEUE, "enqueue", lanes: true);
// Enqueues nothing, only moves the offset past parked tasks.
script!(PASS, "enqueue", lanes: true, oom: allow);
script!(REWIND, "rewind", lanes: false, oom: allow);
script!(CLAIM, "claim", lanes: true);
script!(COMPLETE, "complete", lanes: false, oom: allow);
script!(REJECT, "reject", lanes: true, oom: allow);
script!(EXTEND, "extend", lanes: false, oom: allow);
script!(EXPIRE, "expire", lanes: true, oom: allow);
script!(PROMOTE, "promote", lanes: true, oom: allow);
script!(SWEEP, "sweep", lanes: true, oom: allow);
script!(INSPECT, "inspect", lanes: false);
script!(STATS, "stats", lanes: true);
script!(FINALS, "finals", lanes: false, oom: allow);
script!(FORGET, "forget", lanes: false, oom: allow);
script!(OUTBOX, "outbox", lanes: false, oom: allow);
script!(FORWARDED, "forwarded", lanes: false, oom: allow);

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
