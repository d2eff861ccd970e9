//! The report: the planned counts, next to the actual ones.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use comfy_table::CellAlignment;
use indicatif::HumanCount;
use serde::Serialize;

use super::{
    args::Load,
    ledger::Ledger,
    plan::{Kind, Plan},
};
use crate::{cli::print, wire::pb::QueueBooks};

/// The most tasks that a line lists.
const NAMED: usize = 5;

#[derive(Serialize)]
pub(super) struct Report<'a> {
    queue: &'a str,
    workers: u16,
    asked: Counts,
    happened: Counts,
    /// The counts in SQL; `None` if the caller is not allowed to read them.
    books: Option<Counts>,
    sent_per_second: f64,
    ended_per_second: f64,
    seconds: f64,
    /// The time from the insert call to the first handler.
    latency_ms: Latency,
    /// Lost leases and failed calls. They are not mistakes, because taskd may be killed during the
    /// run.
    lost_leases: u64,
    failed_calls: u64,
    /// A line for each count that differs from the plan.
    pub(super) wrong: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Counts {
    new: u64,
    duplicates: u64,
    completed: u64,
    died: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed_once: Option<u64>,
}

/// One of the counts.
type Count = fn(&Counts) -> u64;

#[derive(Default, Serialize)]
struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

impl<'a> Report<'a> {
    pub(super) fn new(
        args: &Load,
        queue: &'a str,
        plan: &Plan,
        ledger: &Ledger,
        books: Option<&QueueBooks>,
        sent: Duration,
        took: Duration,
    ) -> Self {
        let new = u64::from(plan.new_tasks());
        let dying = u64::from(plan.of_kind(Kind::Dying));
        let asked = Counts {
            new,
            duplicates: u64::from(plan.count()) - new,
            completed: new - dying,
            died: dying,
            failed_once: Some(plan.of_kind(Kind::Failing).into()),
        };
        let happened = Counts {
            new: ledger.created(),
            duplicates: ledger.duplicates(),
            completed: ledger.completed(),
            died: ledger.died(),
            failed_once: Some(ledger.failed()),
        };
        let books = books.map(|books| Counts {
            new: books.stored,
            duplicates: books.duplicates,
            completed: books.completed,
            died: books.dead,
            failed_once: None,
        });
        let waits = ledger.waits();
        let at = |share: f64| {
            let place = (waits.len() as f64 * share) as usize;
            waits
                .get(place.min(waits.len().saturating_sub(1)))
                .map_or(0.0, |wait| wait.as_secs_f64() * 1000.0)
        };
        let mut report = Self {
            queue,
            workers: args.workers,
            asked,
            happened,
            books,
            sent_per_second: f64::from(plan.count()) / sent.as_secs_f64(),
            ended_per_second: ledger.ended() as f64 / took.as_secs_f64(),
            seconds: took.as_secs_f64(),
            latency_ms: Latency {
                p50: at(0.5),
                p90: at(0.9),
                p99: at(0.99),
                max: at(1.0),
            },
            lost_leases: ledger.lost(),
            failed_calls: ledger.away.load(Relaxed),
            wrong: Vec::new(),
        };
        report.wrong = report.mistakes(ledger);
        report
    }

    fn mistakes(&self, ledger: &Ledger) -> Vec<String> {
        let mut wrong = Vec::new();
        let (lost, doubled) = ledger.wrong();
        // If an answer was lost, this process misses the end of a task, but SQL does not.
        let is_settled = self
            .books
            .is_some_and(|books| books.completed + books.died >= self.asked.new);
        let lost = if is_settled { Vec::new() } else { lost };
        for (tasks, what) in [(lost, "have not ended"), (doubled, "ended twice")] {
            if !tasks.is_empty() {
                let names: Vec<_> = tasks.iter().take(NAMED).map(ToString::to_string).collect();
                let more = if tasks.len() > NAMED { ", …" } else { "" };
                wrong.push(format!(
                    "{} tasks of {} {what}: {}{more}",
                    tasks.len(),
                    self.queue,
                    names.join(", ")
                ));
            }
        }
        let strange = ledger.strange.load(Relaxed);
        if strange > 0 {
            wrong.push(format!("workers got {strange} tasks that nobody sent"));
        }
        let mut compare = |what: &str, asked: u64, has: u64| {
            if asked != has {
                wrong.push(format!("{what}: {asked} asked for, {has} happened"));
            }
        };
        let Counts {
            new,
            duplicates,
            completed,
            died,
            failed_once,
        } = self.asked;
        compare(
            "inserts",
            new + duplicates,
            self.happened.new + self.happened.duplicates,
        );
        // An expired lease causes an extra attempt, and a repeated call may get a different answer.
        if self.failed_calls == 0 && self.lost_leases == 0 {
            compare("completed tasks", completed, self.happened.completed);
            compare("dead tasks", died, self.happened.died);
            compare(
                "failed first attempts",
                failed_once.unwrap_or(0),
                self.happened.failed_once.unwrap_or(0),
            );
        }
        match &self.books {
            Some(books) => {
                compare("new tasks in SQL", new, books.new);
                compare("completed tasks in SQL", completed, books.completed);
                compare("dead tasks in SQL", died, books.died);
            }
            None => compare("new tasks", new, self.happened.new),
        }
        wrong
    }

    pub(super) fn table(&self) -> String {
        let mut table = print::table(["", "asked for", "happened", "in SQL"]);
        let count = |count: u64| HumanCount(count).to_string();
        let books = |of: Count| {
            self.books
                .as_ref()
                .map_or(String::new(), |books| count(of(books)))
        };
        let rows: [(&str, Count); 4] = [
            ("new tasks", |counts| counts.new),
            ("duplicates", |counts| counts.duplicates),
            ("completed", |counts| counts.completed),
            ("died", |counts| counts.died),
        ];
        for (name, of) in rows {
            table.add_row([
                name.to_owned(),
                count(of(&self.asked)),
                count(of(&self.happened)),
                books(of),
            ]);
        }
        let failed = |counts: &Counts| count(counts.failed_once.unwrap_or(0));
        table.add_row([
            "failed once".to_owned(),
            failed(&self.asked),
            failed(&self.happened),
            String::new(),
        ]);
        table
            .column_iter_mut()
            .skip(1)
            .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let Latency { p50, p90, p99, max } = self.latency_ms;
        format!(
            "{table}\n\n{} workers; {:.0} tasks/s sent, {:.0}/s ended, {:.1} s\n\
             insert to handler, ms: p50 {p50:.1}, p90 {p90:.1}, p99 {p99:.1}, max {max:.1}\n\
             {} leases lost, {} calls failed",
            self.workers,
            self.sent_per_second,
            self.ended_per_second,
            self.seconds,
            self.lost_leases,
            self.failed_calls
        )
    }
}
