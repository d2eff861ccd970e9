//! The Lua scripts, and one call of one.

use std::sync::LazyLock;

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, ToRedisArgs, Value, aio::ConnectionManager};

use super::keys::{ShardKeys, WITHOUT_LANES};

/// One file of `lua/` behind the head that all share (but [`OPEN`]). What Redis runs is one text with one SHA.
pub struct Script {
    pub name: &'static str,
    code: &'static str,
    lanes: bool,
    sha: LazyLock<String>,
}

macro_rules! script {
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

script!(OPEN, "open", lanes: true, head: "");
script!(ENQUEUE, "enqueue", lanes: true);
script!(CLAIM, "claim", lanes: true);
script!(COMPLETE, "complete", lanes: false);
script!(REJECT, "reject", lanes: true);
script!(EXTEND, "extend", lanes: false);
script!(EXPIRE, "expire", lanes: true);
script!(PROMOTE, "promote", lanes: true);
script!(SWEEP, "sweep", lanes: true);
script!(INSPECT, "inspect", lanes: false);
script!(STATS, "stats", lanes: true);
script!(FINALS, "finals", lanes: false);
script!(FORGET, "forget", lanes: false);
script!(OUTBOX, "outbox", lanes: false);
script!(FORWARDED, "forwarded", lanes: false);

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

    /// Runs it. A server that does not know the script (new, restarted, flushed) is taught it first.
    pub async fn run(&self, conn: &mut ConnectionManager) -> Result<Value, RedisError> {
        match self.command.query_async(conn).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                let () = redis::cmd("SCRIPT")
                    .arg("LOAD")
                    .arg(self.script.code)
                    .query_async(conn)
                    .await
                    .map(|_: String| ())?;
                self.command.query_async(conn).await
            }
            other => other,
        }
    }
}
