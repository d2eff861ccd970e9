//! Checks the completions: each task must be completed by exactly NUM distinct workers.

use crate::cli::queues::Counts;

/// The most tasks that a message lists.
const NAMED: usize = 5;

/// The numbers of the tasks that a worker completed, in the order of the answers.
pub(super) type Credits = Vec<u32>;

/// The mistakes in the completions of a phase; empty by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Tasks that fewer than NUM workers completed.
    pub(super) lost: Vec<u32>,
    /// Tasks that more than NUM workers completed, or one worker twice.
    pub(super) doubled: Vec<u32>,
    /// The counts in SQL, if they do not show all tasks as completed.
    pub(super) sql: Option<Counts>,
}

impl Verdict {
    /// Compares the completions of all workers with the expected ones.
    pub(super) fn of(tasks: u32, replicas: u16, workers: Vec<Credits>) -> Self {
        let mut counts = vec![0_u16; tasks as usize];
        let mut doubled = Vec::new();
        for mut credits in workers {
            credits.sort_unstable();
            doubled.extend(
                credits
                    .windows(2)
                    .filter(|pair| pair[0] == pair[1])
                    .map(|pair| pair[0]),
            );
            credits.dedup();
            for number in credits {
                match counts.get_mut(number as usize) {
                    Some(count) => *count = count.saturating_add(1),
                    // No such task was inserted.
                    None => doubled.push(number),
                }
            }
        }
        let with = |is_wrong: &dyn Fn(u16) -> bool| {
            (0..tasks)
                .filter(|number| is_wrong(counts[*number as usize]))
                .collect::<Vec<_>>()
        };
        let lost = with(&|count| count < replicas);
        doubled.extend(with(&|count| count > replicas));
        doubled.sort_unstable();
        doubled.dedup();
        Self {
            lost,
            doubled,
            sql: None,
        }
    }

    pub(super) fn is_right(&self) -> bool {
        *self == Self::default()
    }

    /// Describes the mistakes, in one line.
    pub(super) fn describe(&self, phase: &str, queue: &str) -> String {
        let mut parts = Vec::new();
        for (tasks, what) in [(&self.lost, "lost"), (&self.doubled, "completed too often")] {
            if !tasks.is_empty() {
                let mut names: Vec<_> = tasks
                    .iter()
                    .take(NAMED)
                    .map(|number| super::work::key(*number))
                    .collect();
                if tasks.len() > NAMED {
                    names.push("…".to_owned());
                }
                parts.push(format!("{} {what} ({})", tasks.len(), names.join(", ")));
            }
        }
        if let Some(counts) = &self.sql {
            let Counts {
                completed,
                dead,
                cancelled,
                ..
            } = counts;
            let open = counts.all() - completed - dead - cancelled;
            parts.push(format!(
                "SQL shows {completed} completed, {dead} dead, {cancelled} cancelled, {open} unfinished"
            ));
        }
        format!("{phase}: tasks of {queue}: {}", parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_by_num_distinct_workers_is_right() {
        assert!(Verdict::of(3, 1, vec![vec![2, 0], vec![1], vec![]]).is_right());
        assert!(Verdict::of(2, 2, vec![vec![0], vec![1, 0], vec![1]]).is_right());
    }

    #[test]
    fn a_lost_and_a_doubled_task_are_named() {
        let verdict = Verdict::of(4, 2, vec![vec![0, 1, 3], vec![0, 1], vec![1, 3]]);
        assert_eq!(
            (verdict.lost.as_slice(), verdict.doubled.as_slice()),
            (&[2][..], &[1][..])
        );
        let line = verdict.describe("process", "bench-1");
        let want =
            "process: tasks of bench-1: 1 lost (000000002); 1 completed too often (000000001)";
        assert_eq!(line, want);
    }

    #[test]
    fn two_completions_by_one_worker_are_one_too_many() {
        let verdict = Verdict::of(1, 2, vec![vec![0, 0]]);
        assert_eq!(
            (verdict.lost.as_slice(), verdict.doubled.as_slice()),
            (&[0][..], &[0][..])
        );
    }

    #[test]
    fn a_task_that_nobody_inserted_is_one_too_many() {
        assert_eq!(Verdict::of(1, 1, vec![vec![0, 7]]).doubled, [7]);
    }

    #[test]
    fn what_sql_shows_is_told() {
        let sql = Some(Counts {
            completed: 8,
            dead: 1,
            pending: 1,
            ..Counts::default()
        });
        let line = Verdict {
            sql,
            ..Verdict::default()
        }
        .describe("process", "q");
        assert_eq!(
            line,
            "process: tasks of q: SQL shows 8 completed, 1 dead, 0 cancelled, 1 unfinished"
        );
    }
}
