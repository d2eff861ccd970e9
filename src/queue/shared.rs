//! Shared sessions: their books are in Redis, so any process serves them (`lua/lib/shared.lua`).

use std::time::Duration;

use redis::Value;
use serde::{Deserialize, de::IgnoredAny as Any};
use uuid::Uuid;

use super::{
    error::{Error, Result},
    session::{EndedLease, Started},
    wire::{bytes, items, ms, number, text},
    worker::WorkerQueue,
};
use crate::{
    model::{LeaseToken, LeasedTask, TaskId, WorkerName},
    redis_pool::{Call, Script, scripts},
};

/// The slots of a cluster that hold shared sessions. All processes divide the workers in the same
/// way.
pub const SESSION_SLOTS: u32 = 8;
/// How long a process is presumed alive after a sign of life. After that its allotments are freed.
pub(super) const LIVES: Duration = Duration::from_secs(10);
/// The most sessions that one check of a slot returns.
const DUE_AT_ONCE: usize = 100;
/// The most tasks that one call records: far below what Lua's stack holds.
const NOTED_AT_ONCE: usize = 1000;
/// The most shared sessions of a worker: each `want` reads all of them, with their plans.
pub const WORKER_SESSIONS: usize = 100;

/// A shared session, by its worker and its own name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedSession {
    pub worker: WorkerName,
    pub id: Uuid,
}

impl SharedSession {
    /// The slot of its keys, below [`SESSION_SLOTS`].
    pub fn slot(&self) -> u32 {
        slot_of(&self.worker)
    }
}

/// The limits of what is held and demanded.
#[derive(Clone, Copy, Debug)]
pub struct SharedLimits {
    pub session: u32,
    pub worker: usize,
}

/// The answer to the opening of a session.
#[derive(Debug)]
pub enum SharedOpened {
    /// Opened. Contains the leases that the worker does not hold.
    Open(Vec<EndedLease>),
    /// There is no session to resume.
    Unknown,
    /// The slot has too many sessions.
    Full,
    /// The worker has too many sessions.
    WorkerFull,
}

/// What a call asks for.
#[derive(Clone, Copy, Debug)]
pub enum SharedWish {
    More(u32),
    /// More, unless the demand was set to 0 since: `surrenders` is how often that had happened
    /// before.
    Rest {
        want: u32,
        surrenders: u64,
    },
    /// No more at all.
    Surrender,
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedCalled {
    /// How much was granted, or surrendered.
    pub by: u32,
    pub demand: u32,
    pub in_hand: u32,
    pub plan: Vec<u8>,
    /// The cap allowed less than requested, and streams of the worker may give a part back.
    pub streams_hold: bool,
    /// How often the demand was set to 0.
    pub surrenders: u64,
}

/// The outcome of adding tasks to a session's book.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedHold {
    Held { demand: u32, in_hand: u32 },
    TooMany { demand: u32 },
    Over,
}

/// Changes of a book.
#[derive(Debug, Default)]
pub struct SharedNotes {
    /// Leases that ended, and whether a report ended them.
    pub ended: Vec<(TaskId, LeaseToken, bool)>,
    /// Leases with their new deadlines (unix ms), and whether their tasks are started, if they are
    /// new to the session.
    pub extended: Vec<(TaskId, LeaseToken, i64, Started)>,
}

/// A book after changes were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedNoted {
    /// The number of held tasks that reports ended.
    pub counted: u32,
    pub demand: u32,
    pub in_hand: u32,
}

/// The result of checking a slot.
#[derive(Debug, Default)]
pub struct SharedDue {
    /// How long until a session is due; `None` if there is none.
    pub next: Option<Duration>,
    /// Processes that died and had allotments.
    pub dead: Vec<String>,
    pub due: Vec<SharedSession>,
}

/// The slot of a worker's sessions: FNV-1a of the name. It must be the same in all versions.
pub(super) fn slot_of(worker: &WorkerName) -> u32 {
    let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    worker.as_str().bytes().fold(0x811c_9dc5, hash) % SESSION_SLOTS
}

/// The keys of a shared session, in the order of `lua/lib/shared.lua`.
pub fn shared_keys(prefix: &str, session: &SharedSession) -> [String; 5] {
    let SharedSession { worker, id } = session;
    let base = base(prefix, slot_of(worker));
    [
        format!("{base}:of:{worker}"),
        format!("{base}:due"),
        format!("{base}:processes"),
        format!("{base}:held:{id}"),
        format!("{base}:ends:{id}"),
    ]
}

pub(super) fn base(prefix: &str, slot: u32) -> String {
    format!("{prefix}:{{sessions:{slot}}}")
}

impl WorkerQueue {
    fn shared(&self, script: &'static Script, session: &SharedSession) -> Call {
        let keys = shared_keys(self.prefix(), session);
        let mut call = script.call(&keys).now(self.clock().moved_unix_ms());
        call.arg(session.worker.as_str())
            .arg(session.id.to_string());
        call
    }

    pub(super) async fn run_shared(&self, call: Call) -> Result<Vec<Value>> {
        items(call.run(&mut self.conn()).await?)
    }

    /// Opens a session, or resumes one. `anew` is for a new one: the most sessions of its slot and
    /// of its worker. `holding` are the tasks that the worker holds, if it resumes.
    pub async fn open_shared(
        &self,
        session: &SharedSession,
        anew: Option<(usize, usize)>,
        timeout: Duration,
        plan: &[u8],
        holding: &[TaskId],
    ) -> Result<SharedOpened> {
        let mut call = self.shared(&scripts::SHARED_OPEN, session);
        let (most, most_of_worker) = anew.unwrap_or_default();
        call.arg(u8::from(anew.is_some()))
            .arg(ms(timeout))
            .arg(plan)
            .arg(most)
            .arg(most_of_worker);
        for id in holding {
            call.arg(id.as_bytes());
        }
        let mut answer = self.run_shared(call).await?.into_iter();
        match number(answer.next())? {
            0 => return Ok(SharedOpened::Unknown),
            1 => {}
            3 => return Ok(SharedOpened::WorkerFull),
            _ => return Ok(SharedOpened::Full),
        }
        leases(items(answer.next().unwrap_or(Value::Nil))?, &session.worker).map(SharedOpened::Open)
    }

    /// Makes a call of the session's worker. Returns `None` if there is no such session any more.
    pub async fn call_shared(
        &self,
        session: &SharedSession,
        wish: SharedWish,
        limits: SharedLimits,
        started: &[TaskId],
    ) -> Result<Option<SharedCalled>> {
        let mut call = self.shared(&scripts::SHARED_CALL, session);
        let (want, surrenders) = match wish {
            SharedWish::More(want) => (Some(want), None),
            SharedWish::Rest { want, surrenders } => (Some(want), Some(surrenders)),
            SharedWish::Surrender => (None, None),
        };
        let or_nothing =
            |number: Option<u64>| number.map(|number| number.to_string()).unwrap_or_default();
        call.arg(or_nothing(want.map(u64::from)))
            .arg(limits.session)
            .arg(limits.worker)
            .arg(or_nothing(surrenders));
        for id in started {
            call.arg(id.as_bytes());
        }
        let answer = self.run_shared(call).await?;
        if answer.is_empty() {
            return Ok(None);
        }
        let mut answer = answer.into_iter();
        let by = number(answer.next())?;
        let demand = number(answer.next())?;
        let in_hand = number(answer.next())?;
        let plan = bytes(answer.next())?.to_vec();
        let streams_hold = number::<u8>(answer.next())? == 1;
        let surrenders = number(answer.next())?;
        Ok(Some(SharedCalled {
            by,
            demand,
            in_hand,
            plan,
            streams_hold,
            surrenders,
        }))
    }

    /// Adds tasks on their way to the worker to the book: all of them, or none.
    pub async fn hold_shared(
        &self,
        session: &SharedSession,
        tasks: &[LeasedTask],
        started: Started,
    ) -> Result<SharedHold> {
        let mut call = self
            .shared(&scripts::SHARED_HOLD, session)
            .of_items(tasks.len());
        for task in tasks {
            call.arg(task.id.as_bytes())
                .arg(format!("{}{}", started as u8, task.token))
                .arg(task.expires_unix_ms);
        }
        let mut answer = self.run_shared(call).await?.into_iter();
        let code = number(answer.next())?;
        let demand = number(answer.next())?;
        let in_hand = number(answer.next())?;
        Ok(match code {
            0 => SharedHold::Over,
            1 => SharedHold::Held { demand, in_hand },
            _ => SharedHold::TooMany { demand },
        })
    }

    /// Records what became of tasks. Returns `None` if there is no such session any more.
    pub async fn note_shared(
        &self,
        session: &SharedSession,
        notes: &SharedNotes,
    ) -> Result<Option<SharedNoted>> {
        let mut all = SharedNoted::default();
        let mut ended = notes.ended.chunks(NOTED_AT_ONCE);
        let mut extended = notes.extended.chunks(NOTED_AT_ONCE);
        let mut of_ended = ended.next().unwrap_or_default();
        let mut of_extended = extended.next().unwrap_or_default();
        loop {
            let mut call = self
                .shared(&scripts::SHARED_NOTE, session)
                .of_items(of_ended.len() + of_extended.len());
            call.arg(of_ended.len());
            for (id, token, counts) in of_ended {
                call.arg(id.as_bytes())
                    .arg(token.to_string())
                    .arg(u8::from(*counts));
            }
            for (id, token, deadline_unix_ms, started) in of_extended {
                call.arg(id.as_bytes())
                    .arg(token.to_string())
                    .arg(*deadline_unix_ms)
                    .arg(*started as u8);
            }
            let answer = self.run_shared(call).await?;
            if answer.is_empty() {
                return Ok(None);
            }
            let mut answer = answer.into_iter();
            all.counted += number::<u32>(answer.next())?;
            all.demand = number(answer.next())?;
            all.in_hand = number(answer.next())?;
            of_ended = ended.next().unwrap_or_default();
            of_extended = extended.next().unwrap_or_default();
            if of_ended.is_empty() && of_extended.is_empty() {
                return Ok(Some(all));
            }
        }
    }

    /// Begins the end of a session, and returns the leases that it holds. Returns `None` if there
    /// is none, or it is not due.
    pub async fn end_shared(
        &self,
        session: &SharedSession,
        only_due: bool,
        again_in: Duration,
    ) -> Result<Option<Vec<EndedLease>>> {
        let mut call = self.shared(&scripts::SHARED_END, session);
        call.arg(u8::from(only_due)).arg(ms(again_in));
        let mut answer = self.run_shared(call).await?;
        if answer.is_empty() || number::<u8>(Some(answer.remove(0)))? == 0 {
            return Ok(None);
        }
        leases(answer, &session.worker).map(Some)
    }

    /// Gives a session that is due its full time-out again.
    pub async fn spare_shared(&self, session: &SharedSession) -> Result<()> {
        let mut call = self.shared(&scripts::SHARED_END, session);
        call.arg(2).arg(0);
        self.run_shared(call).await.map(drop)
    }

    /// The shared sessions of a worker.
    pub async fn shared_of(&self, worker: &WorkerName) -> Result<Vec<Uuid>> {
        let [of_worker, ..] = shared_keys(
            self.prefix(),
            &SharedSession {
                worker: worker.clone(),
                id: Uuid::nil(),
            },
        );
        let fields: Vec<String> = redis::cmd("HKEYS")
            .arg(of_worker)
            .query_async(&mut self.conn())
            .await?;
        fields
            .iter()
            .filter(|field| !field.starts_with('p'))
            .map(|field| session_id(field))
            .collect()
    }

    /// Returns the plan of a session, or `None` if there is no such session.
    pub async fn shared_plan(&self, session: &SharedSession) -> Result<Option<String>> {
        let [of_worker, ..] = shared_keys(self.prefix(), session);
        let mut read = redis::cmd("HGET");
        read.arg(of_worker).arg(session.id.to_string());
        let entry: Option<Vec<u8>> = read.query_async(&mut self.conn()).await?;
        entry.map(|entry| read_plan(&entry)).transpose()
    }

    /// Removes a session whose leases have ended.
    pub async fn forget_shared(&self, session: &SharedSession) -> Result<()> {
        self.shared(&scripts::SHARED_FORGET, session)
            .run(&mut self.conn())
            .await?;
        Ok(())
    }

    /// Checks a slot for sessions that are due and for dead processes.
    pub async fn due_shared(&self, slot: u32, longest_timeout: Duration) -> Result<SharedDue> {
        let base = base(self.prefix(), slot);
        let keys = [format!("{base}:due"), format!("{base}:processes")];
        let mut call = scripts::SHARED_DUE
            .call(&keys)
            .now(self.clock().moved_unix_ms());
        call.arg(ms(longest_timeout))
            .arg(DUE_AT_ONCE)
            .arg(ms(LIVES));
        let mut answer = self.run_shared(call).await?.into_iter();
        let next = number::<i64>(answer.next())?;
        let dead = items(answer.next().unwrap_or(Value::Nil))?;
        let dead = dead
            .into_iter()
            .map(|process| text(Some(process)))
            .collect::<Result<_>>()?;
        let due = answer
            .map(|member| read_member(&text(Some(member))?))
            .collect::<Result<_>>()?;
        Ok(SharedDue {
            next: u64::try_from(next).ok().map(Duration::from_millis),
            dead,
            due,
        })
    }
}

fn session_id(text: &str) -> Result<Uuid> {
    text.parse()
        .map_err(|_| Error::Answer(format!("{text:?} where a session should be")))
}

/// The plan in an entry of `lua/lib/shared.lua`.
fn read_plan(entry: &[u8]) -> Result<String> {
    #[derive(Deserialize)]
    struct Entry(Any, Any, Any, Any, String, Any, Any);

    let Entry(.., plan, _, _) = rmp_serde::from_slice(entry)
        .map_err(|error| Error::Answer(format!("a session that cannot be read: {error}")))?;
    Ok(plan)
}

/// Reads a session and its worker from one text.
fn read_member(member: &str) -> Result<SharedSession> {
    let wrong = || {
        Error::Answer(format!(
            "{member:?} where a session and its worker should be"
        ))
    };
    let (id, worker) = member.split_at_checked(36).ok_or_else(wrong)?;
    Ok(SharedSession {
        id: session_id(id)?,
        worker: WorkerName::new(worker).map_err(|_| wrong())?,
    })
}

/// Reads leases as a book has them: id, started and token, deadline.
fn leases(answer: Vec<Value>, worker: &WorkerName) -> Result<Vec<EndedLease>> {
    let mut values = answer.into_iter();
    let mut leases = Vec::with_capacity(values.len() / 3);
    while let Some(id) = values.next() {
        let id = super::wire::task_id(Some(id))?;
        let held = text(values.next())?;
        let (started, token) = held.split_at_checked(1).unwrap_or_default();
        let started = match started {
            "0" => Started::No,
            "2" => Started::Yes,
            _ => Started::Perhaps,
        };
        let token = token
            .parse()
            .map_err(|_| Error::Answer(format!("{token:?} where a lease token should be")))?;
        let deadline_unix_ms = number(values.next())?;
        leases.push(EndedLease {
            id,
            token,
            worker: worker.clone(),
            deadline_unix_ms,
            started,
        });
    }
    Ok(leases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_sessions_have_one_slot_in_all_versions() {
        let slot = |name: &str| slot_of(&WorkerName::new(name).unwrap());
        assert_eq!(["w", "py-1", "a worker", "}{"].map(slot), [6, 4, 2, 1]);
    }

    #[test]
    fn a_plan_is_read_from_an_entry() {
        let plan = "{}".repeat(100);
        for entry in [
            rmp_serde::to_vec(&(15_000, 3, 0.5, 0, &plan, 0, 0)),
            rmp_serde::to_vec(&(2000, 0, 7, 1, &plan, 9, 1_700_000_000_000_u64)),
        ] {
            assert_eq!(read_plan(&entry.unwrap()).unwrap(), plan);
        }
        assert!(read_plan(b"x").is_err());
    }

    #[test]
    fn a_member_is_a_session_and_its_worker() {
        let session = SharedSession {
            worker: WorkerName::new("a worker").unwrap(),
            id: Uuid::new_v4(),
        };
        assert_eq!(
            read_member(&format!("{}{}", session.id, session.worker)).unwrap(),
            session
        );
        for wrong in ["", "x", &session.id.to_string(), "ééééééééééééééééééw"] {
            assert!(read_member(wrong).is_err(), "{wrong:?}");
        }
    }
}
