//! Dead letters: lists and reads them, sends them again and purges them.

use std::collections::{HashMap, HashSet};

use tracing::Instrument as _;

use super::{
    access::{reaches_all_of, reaches_everything, who},
    error::Error,
    handle::{Api, span},
    query::{LISTED, bounded},
    reader::Reader,
};
use crate::{
    model::{
        Act, Caller, ChangeLetters, ChosenLetters, ECHO, InsertAnswer, InsertStatus, LetterId,
        LetterKind, LetterPage, LetterPages, LetterReasons, LettersChanged, NewTask, StoredLetter,
        TaskId, TaskTree, shorten,
    },
    pipelines::discovery,
};

/// How many letters a change takes, if the caller does not say.
const CHANGED: u32 = 500;
/// How many letters a count of reasons reads at a time, and how often.
const COUNTED_AT_ONCE: u32 = 1000;
const COUNTED_PAGES: usize = 10;
/// How many letters are read and inserted at a time. Each may have 8 MiB.
const INSERTED_AT_ONCE: usize = 8;

impl Api {
    /// Returns a page of letters, without payloads and values.
    pub async fn letters(
        &self,
        caller: &Caller,
        pages: Result<LetterPages, String>,
    ) -> Result<LetterPage, Error> {
        let pages = checked(pages.map_err(Error::Invalid)?, LISTED)?;
        reaches_all_of(caller, pages.filter.queue.as_ref())?;
        let store = self.query()?.store();
        Ok(store
            .letters(&pages)
            .instrument(span("letters", caller))
            .await?)
    }

    /// Counts the newest letters of a filter by their reasons.
    pub async fn letter_reasons(
        &self,
        caller: &Caller,
        pages: Result<LetterPages, String>,
    ) -> Result<LetterReasons, Error> {
        let mut pages = checked(pages.map_err(Error::Invalid)?, LISTED)?;
        reaches_all_of(caller, pages.filter.queue.as_ref())?;
        pages.limit = COUNTED_AT_ONCE;
        let store = self.query()?.store();
        let count = async {
            let mut reasons = LetterReasons::default();
            for _ in 0..COUNTED_PAGES {
                let page = store.letters(&pages).await?;
                reasons.count(&page.letters);
                pages.after = page.next;
                if pages.after.is_none() {
                    break;
                }
            }
            reasons.at_least = pages.after.is_some();
            reasons.finish();
            Ok(reasons)
        };
        count.instrument(span("letter_reasons", caller)).await
    }

    /// Returns a letter with everything that it contains.
    pub async fn letter(&self, caller: &Caller, id: &str) -> Result<StoredLetter, Error> {
        let id: LetterId = id
            .parse()
            .map_err(|_| Error::NotALetterId(shorten(id, ECHO).into_owned()))?;
        let query = self.query()?;
        let read = async {
            let letter = query.store().letter(id).await?;
            // A letter without a queue is shown only to callers that reach all queues.
            let access = &caller.access;
            let reached = letter.filter(|letter| {
                access.reaches_everything() || access.reaches(&letter.letter.queue)
            });
            let mut reached = reached.ok_or(Error::NoSuchLetter(id))?;
            if reached.kind == LetterKind::Task {
                query.complete_history(id, &mut reached.letter).await?;
            }
            Ok(reached)
        };
        read.instrument(span("letter", caller)).await
    }

    /// Sends letters again. If a call broke off and is repeated, it changes only the rest.
    pub async fn retry_letters(
        &self,
        caller: &Caller,
        change: Result<ChangeLetters, String>,
    ) -> Result<LettersChanged, Error> {
        let retry = async {
            let (mut changed, letters) = self.choose(caller, change).await?;
            if let Some(letters) = letters {
                // The acts on dead tasks are recorded together with the change.
                let others = letters.iter().filter(|(_, kind)| *kind != LetterKind::Task);
                self.keep_acts(caller, "retry", others.map(|(id, _)| id))
                    .await?;
                self.retry(caller, letters, &mut changed).await?;
                note("sent again", &changed);
            }
            Ok(changed)
        };
        retry.instrument(span("retry_letters", caller)).await
    }

    /// Purges letters. Of a dead task only the key remains.
    pub async fn purge_letters(
        &self,
        caller: &Caller,
        change: Result<ChangeLetters, String>,
    ) -> Result<LettersChanged, Error> {
        let purge = async {
            let (mut changed, letters) = self.choose(caller, change).await?;
            if let Some(letters) = letters {
                let ids = self.old_enough(letters, &mut changed).await?;
                self.keep_acts(caller, "purge", ids.iter()).await?;
                changed.changed = self.query()?.store().purge(&ids).await?;
                note("purged", &changed);
            }
            Ok(changed)
        };
        purge.instrument(span("purge_letters", caller)).await
    }

    /// Leaves out tasks that died recently. A completion of such a task may still be on its way,
    /// and the tasks that its worker discovered would be lost: SQL settles nothing for a task that
    /// it does not have.
    async fn old_enough(
        &self,
        letters: Vec<(LetterId, LetterKind)>,
        changed: &mut LettersChanged,
    ) -> Result<Vec<LetterId>, Error> {
        let query = self.query()?;
        let watchdog = &query.settings.watchdog;
        let age = 2 * (watchdog.grace + watchdog.republish_after);
        let dead = letters.iter().filter(|(_, kind)| *kind == LetterKind::Task);
        let dead: Vec<LetterId> = dead.map(|(id, _)| *id).collect();
        let lately: HashSet<LetterId> = query
            .store()
            .lately_final(&dead, age)
            .await?
            .into_iter()
            .collect();
        let why = format!(
            "the task died less than {} ago, and reports about it may be on their way: purge it later",
            humantime::format_duration(age)
        );
        changed
            .failed
            .extend(lately.iter().map(|id| (*id, why.clone())));
        Ok(letters
            .into_iter()
            .map(|(id, _)| id)
            .filter(|id| !lately.contains(id))
            .collect())
    }

    /// Records the acts before anything is changed.
    async fn keep_acts(
        &self,
        caller: &Caller,
        what: &str,
        letters: impl Iterator<Item = &LetterId>,
    ) -> Result<(), Error> {
        let query = self.query()?;
        let now = query.now_unix_ms();
        let act = |id: &LetterId| Act::at_time(now, who(caller), &act_of(what), &id.to_string());
        Ok(query
            .store()
            .keep_acts(&letters.map(act).collect::<Vec<_>>())
            .await?)
    }

    /// Finds the letters that a request names. Returns what can be answered so far, and the letters
    /// to change; `None` if the caller only wants to count.
    async fn choose(
        &self,
        caller: &Caller,
        change: Result<ChangeLetters, String>,
    ) -> Result<(LettersChanged, Option<Vec<(LetterId, LetterKind)>>), Error> {
        // The token may have been revoked while the body was read.
        self.authentication.still_valid(caller)?;
        let ChangeLetters {
            chosen,
            dry_run,
            yes,
        } = change.map_err(Error::Invalid)?;
        let store = self.query()?.store();
        let mut changed = LettersChanged::default();
        let letters: Vec<(LetterId, LetterKind)> = match chosen {
            ChosenLetters::Ids(ids) => {
                reaches_everything(caller)?;
                let found = store.letter_kinds(&ids).await?;
                let known: HashSet<LetterId> = found.iter().map(|(id, _)| *id).collect();
                let missing = ids.into_iter().filter(|id| !known.contains(id));
                changed.failed = missing
                    .map(|id| (id, Error::NoSuchLetter(id).to_string()))
                    .collect();
                found
            }
            ChosenLetters::Pages(_) if !dry_run && !yes => {
                let why = "a filter may mean many letters: send dry_run = true to count them, or yes = true to go on";
                return Err(Error::Invalid(why.into()));
            }
            ChosenLetters::Pages(pages) => {
                reaches_all_of(caller, pages.filter.queue.as_ref())?;
                let page = store.letters(&checked(pages, CHANGED)?).await?;
                changed.next = page.next;
                page.letters
                    .into_iter()
                    .map(|letter| (letter.id, letter.kind))
                    .collect()
            }
        };
        changed.matched = letters.len() as u64;
        Ok((changed, (!dry_run).then_some(letters)))
    }

    async fn retry(
        &self,
        caller: &Caller,
        letters: Vec<(LetterId, LetterKind)>,
        changed: &mut LettersChanged,
    ) -> Result<(), Error> {
        let mut by_kind: HashMap<LetterKind, Vec<LetterId>> = HashMap::new();
        letters
            .into_iter()
            .for_each(|(id, kind)| by_kind.entry(kind).or_default().push(id));
        let mut of = |kind| by_kind.remove(&kind).unwrap_or_default();
        for id in of(LetterKind::Record) {
            changed.failed.push((
                id,
                "a record cannot be sent again; purge it if it is of no use".into(),
            ));
        }
        let query = self.query()?;
        let dead = of(LetterKind::Task);
        if !dead.is_empty() {
            let now = query.now_unix_ms();
            let act = act_of("retry");
            let retried = query
                .store()
                .retry_with_acts(&dead, now, who(caller), &act)
                .await?;
            let retried: HashSet<LetterId> =
                retried.into_iter().map(|retried| retried.id).collect();
            changed.changed += retried.len() as u64;
            let stayed = dead.into_iter().filter(|id| !retried.contains(id));
            changed
                .failed
                .extend(stayed.map(|id| (id, "the task is not dead any more".to_owned())));
        }
        let unstored = [of(LetterKind::Discovered), of(LetterKind::Refused)].concat();
        for ids in unstored.chunks(INSERTED_AT_ONCE) {
            insert_again(query, self.discovery()?, ids, changed).await?;
        }
        Ok(())
    }
}

fn act_of(what: &str) -> String {
    format!("{what} dead letter")
}

/// Logs what an operator has done.
fn note(done: &str, changed: &LettersChanged) {
    let LettersChanged {
        changed, failed, ..
    } = changed;
    tracing::info!(
        changed,
        failed = failed.len(),
        "{changed} dead letters were {done}, {} stay",
        failed.len()
    );
}

fn checked(pages: LetterPages, usual: u32) -> Result<LetterPages, Error> {
    pages.filter.check().map_err(Error::Invalid)?;
    Ok(LetterPages {
        limit: bounded(pages.limit, usual)?,
        ..pages
    })
}

/// Inserts tasks that were never stored, and purges their letters. If the process is killed in
/// between, a letter remains whose task is a duplicate by then. The letter of a tree goes in the
/// transaction of the insert, which takes it off the tree's count.
async fn insert_again(
    query: &Reader,
    discovery: &discovery::Handle,
    ids: &[LetterId],
    changed: &mut LettersChanged,
) -> Result<(), Error> {
    let mut tasks = Vec::new();
    let mut sent = Vec::new();
    let mut in_trees = Vec::new();
    for id in ids {
        // Somebody else may have purged the letter.
        let Some(StoredLetter { letter, .. }) = query.store().letter(*id).await? else {
            continue;
        };
        match (letter.task, letter.values) {
            _ if letter.incomplete => {
                changed.failed.push((
                    *id,
                    "the letter lacks parts of the task: insert the task anew".into(),
                ));
            }
            (Some(task), None) => {
                // A task that an operator sends again loses its deadline.
                tasks.push(NewTask {
                    deadline_unix_ms: None,
                    finish_within: None,
                    ..task
                });
                sent.push(*id);
                in_trees.push(letter.tree);
            }
            _ => changed
                .failed
                .push((*id, "this version of taskd cannot read the task".into())),
        }
    }
    // What was discovered in a tree belongs there, and has its deadline.
    let mut trees: Vec<TaskId> = in_trees.iter().copied().flatten().collect();
    trees.sort_unstable();
    trees.dedup();
    let trees = query.store().trees_by_id(&trees).await?;
    let deadlines: HashMap<TaskId, i64> = trees
        .into_iter()
        .map(|tree| (tree.id, tree.deadline_unix_ms.unwrap_or(0)))
        .collect();
    for ((task, tree), letter) in tasks.iter_mut().zip(in_trees).zip(&sent) {
        // Retention may have removed the tree.
        if let Some(tree) = tree
            && let Some(deadline_unix_ms) = deadlines.get(&tree)
        {
            task.tree = Some(Box::new(TaskTree::Returns {
                tree,
                letter: *letter,
                deadline_unix_ms: *deadline_unix_ms,
            }));
        }
    }
    let answers = match discovery.insert_again(tasks).await {
        Ok(answers) => answers,
        Err(error) => sent
            .iter()
            .map(|_| InsertAnswer::try_later(error.to_string()))
            .collect(),
    };
    let mut done = Vec::new();
    for (id, InsertAnswer { status, error, .. }) in sent.into_iter().zip(answers) {
        match status {
            InsertStatus::Created | InsertStatus::Duplicate => done.push(id),
            InsertStatus::Rejected | InsertStatus::TryLater => changed.failed.push((id, error)),
        }
    }
    query.store().purge(&done).await?;
    changed.changed += done.len() as u64;
    Ok(())
}
