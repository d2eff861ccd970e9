//! Allotments: how much of a worker's cap its streams in one process may use
//! (`lua/shared_allot.lua`).

use super::{
    error::{Error, Result},
    shared::{LIVES, base, slot_of},
    wire::{ms, number},
    worker::WorkerQueue,
};
use crate::{
    model::WorkerName,
    redis_pool::{Call, scripts},
};

/// How many workers' allotments one call removes.
const GONE_AT_ONCE: usize = 100;

/// The allotment of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allotment {
    pub allotment: usize,
    /// The allotment is less than requested, and other streams of the worker may hold more than
    /// they use.
    pub streams_hold: bool,
}

impl WorkerQueue {
    /// The slot of a worker's sessions, below [`super::SESSION_SLOTS`].
    pub fn session_slot(&self, worker: &WorkerName) -> u32 {
        slot_of(worker)
    }

    fn workers_key(&self, slot: u32, process: &str) -> String {
        format!("{}:workers:{process}", base(self.prefix(), slot))
    }

    fn processes_key(&self, slot: u32) -> String {
        format!("{}:processes", base(self.prefix(), slot))
    }

    fn worker_key(&self, slot: u32, worker: &str) -> String {
        format!("{}:of:{worker}", base(self.prefix(), slot))
    }

    /// Requests an allotment of the worker's cap. It is at least what the process already uses; 0
    /// gives it back.
    pub async fn allot(
        &self,
        process: &str,
        worker: &WorkerName,
        asked: usize,
        used: usize,
        most: usize,
    ) -> Result<Allotment> {
        let slot = slot_of(worker);
        let keys = [
            self.worker_key(slot, worker.as_str()),
            self.processes_key(slot),
            self.workers_key(slot, process),
        ];
        let mut call = scripts::SHARED_ALLOT
            .call(&keys)
            .now(self.clock().moved_unix_ms());
        call.arg(worker.as_str())
            .arg(process)
            .arg(ms(LIVES))
            .arg(asked)
            .arg(used)
            .arg(most);
        let mut answer = self.run_shared(call).await?.into_iter();
        Ok(Allotment {
            allotment: number(answer.next())?,
            streams_hold: number::<u8>(answer.next())? == 1,
        })
    }

    /// Reports that a process is alive and has this many allotments. Returns true if Redis presumed
    /// it dead, or lacks some of them.
    pub async fn live(&self, process: &str, slot: u32, allotments: usize) -> Result<bool> {
        let keys = [self.processes_key(slot), self.workers_key(slot, process)];
        let mut call = scripts::SHARED_LIVE
            .call(&keys)
            .now(self.clock().moved_unix_ms());
        call.arg(process).arg(ms(LIVES)).arg(allotments);
        self.one(call).await.map(|lacks| lacks == 1)
    }

    /// Removes the allotments of a process that died.
    pub async fn forget_allotments(&self, slot: u32, process: &str) -> Result<()> {
        loop {
            let index = self.workers_key(slot, process);
            let mut some = redis::cmd("SRANDMEMBER");
            let workers: Vec<String> = some
                .arg(&index)
                .arg(GONE_AT_ONCE)
                .query_async(&mut self.conn())
                .await?;
            let mut keys = vec![self.processes_key(slot), index];
            keys.extend(workers.iter().map(|worker| self.worker_key(slot, worker)));
            let mut call = scripts::SHARED_GONE
                .call(&keys)
                .now(self.clock().moved_unix_ms());
            call.arg(process).arg(&workers);
            if self.one(call).await? == 0 {
                return Ok(());
            }
        }
    }

    /// Asks all processes to give back what their streams of the worker do not use.
    pub async fn tell_allotment(&self, worker: &WorkerName) -> Result<()> {
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(self.wake_channel()).arg(format!("%{worker}"));
        Ok(publish.exec_async(&mut self.conn()).await?)
    }

    async fn one(&self, call: Call) -> Result<i64> {
        number(Some(call.run(&mut self.conn()).await.map_err(Error::from)?))
    }
}
