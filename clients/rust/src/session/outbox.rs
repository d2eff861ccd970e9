//! The worker's side of a session: the tasks that it holds, what it has to send, and what it sent
//! that is not answered yet.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};

use prost::Message as _;
use tokio::time::Instant;

use super::shared::{Answer, Items, Report};
use crate::{
    error::Error,
    pb::{self, ItemStatus},
    source::EndedLease,
};

/// The most unanswered frames. taskd stops reading at 16.
const MOST_OPEN: usize = 8;
/// The most items and bytes in a frame; a single report may have more.
const MOST_ITEMS: usize = 1000;
const MOST_BYTES: usize = 2 << 20;
/// How long to wait before asking again for demand that taskd did not grant.
const WANT_AGAIN: Duration = Duration::from_millis(500);

#[derive(Default)]
pub(super) struct Outbox {
    waiting: VecDeque<Report>,
    /// Unanswered frames, by number.
    sent: BTreeMap<u64, Sent>,
    last: u64,
    /// How many tasks taskd may still send, according to its last frame.
    pub(super) demand: u32,
    /// The lease tokens of the held tasks, by task id.
    in_hand: HashMap<String, String>,
    want_after: Option<Instant>,
    /// How many reports must be sent one by one, because taskd refused a frame due to one of them.
    alone: usize,
    /// The most items of reports that may share a frame; set after taskd refused a larger frame.
    most_items: Option<usize>,
}

#[derive(Default)]
struct Sent {
    want: u32,
    surrenders: bool,
    reports: Vec<Report>,
}

impl Outbox {
    pub(super) fn report(&mut self, report: Report) {
        // Without a stream no report is sent, but the worker keeps producing new extensions.
        self.waiting.retain(|report| !report.is_over());
        self.waiting.push_back(report);
    }

    /// Queues a report ahead of all others.
    pub(super) fn report_first(&mut self, report: Report) {
        self.waiting.push_front(report);
    }

    pub(super) fn hold(&mut self, tasks: &[pb::LeasedTask]) {
        self.in_hand.extend(
            tasks
                .iter()
                .map(|task| (task.id.clone(), task.lease_token.clone())),
        );
    }

    pub(super) fn forget(&mut self, ids: impl IntoIterator<Item = impl AsRef<str>>) {
        for id in ids {
            self.in_hand.remove(id.as_ref());
        }
    }

    /// Forgets tasks whose leases taskd has ended; returns those that the worker held, with their
    /// lease tokens.
    pub(super) fn ended(&mut self, ended: Vec<pb::ItemResult>) -> Vec<EndedLease> {
        ended
            .into_iter()
            .filter_map(|result| Some((self.in_hand.remove(&result.id)?, result)))
            .collect()
    }

    /// The ids of the held tasks.
    pub(super) fn holding(&self) -> impl Iterator<Item = &String> {
        self.in_hand.keys()
    }

    /// Queues extensions of all held tasks ahead of everything else, which makes the tasks part of
    /// a new session.
    pub(super) fn extend_all(&mut self, by: Option<prost_types::Duration>) {
        let all: Vec<_> = self.in_hand.iter().collect();
        for part in all.chunks(MOST_ITEMS) {
            let extension = |(id, token): &(&String, &String)| pb::Extension {
                id: (*id).clone(),
                lease_token: (*token).clone(),
                by,
            };
            let items = Items::Extensions(part.iter().map(extension).collect());
            self.waiting.push_front(Report { items, reply: None });
        }
    }

    /// True if no frame is unanswered.
    pub(super) fn is_answered(&self) -> bool {
        self.sent.is_empty()
    }

    pub(super) fn has_open_reports(&self) -> bool {
        self.sent.values().any(|sent| !sent.reports.is_empty())
    }

    /// When there may be something to send that nothing else signals.
    pub(super) fn wakes_at(&self) -> Option<Instant> {
        self.want_after
    }

    /// The next frame, if there is something to send: reports, and demand up to `target`.
    pub(super) fn next_frame(&mut self, target: u32, now: Instant) -> Option<pb::WorkerFrame> {
        self.want_after = self.want_after.filter(|after| *after > now);
        let most_open = if self.alone > 0 { 1 } else { MOST_OPEN };
        if self.sent.len() >= most_open {
            return None;
        }
        let mut frame = pb::WorkerFrame::default();
        let reports = self.fill(&mut frame);
        let asked: u32 = self.sent.values().map(|sent| sent.want).sum();
        let more = target.saturating_sub(self.demand).saturating_sub(asked);
        if self.demand > target && !self.sent.values().any(|sent| sent.surrenders) {
            (frame.surrender, frame.want) = (true, target);
        } else if more > 0 && self.want_after.is_none() {
            frame.want = more;
        }
        if reports.is_empty() && frame.want == 0 && !frame.surrender {
            return None;
        }
        Some(self.numbered(frame, reports))
    }

    /// Reduces the demand to 0; returns the frame and its number.
    pub(super) fn surrender(&mut self) -> (u64, pb::WorkerFrame) {
        let frame = pb::WorkerFrame {
            surrender: true,
            ..Default::default()
        };
        let frame = self.numbered(frame, Vec::new());
        (frame.number, frame)
    }

    fn numbered(&mut self, frame: pb::WorkerFrame, reports: Vec<Report>) -> pb::WorkerFrame {
        self.last += 1;
        let sent = Sent {
            want: frame.want,
            surrenders: frame.surrender,
            reports,
        };
        self.sent.insert(self.last, sent);
        pb::WorkerFrame {
            number: self.last,
            ..frame
        }
    }

    /// Moves waiting reports into the frame: at most one of each kind, because the answers are
    /// grouped by kind.
    fn fill(&mut self, frame: &mut pb::WorkerFrame) -> Vec<Report> {
        let mut reports = Vec::new();
        let (mut count, mut bytes) = (0, 0);
        while let Some(report) = self.waiting.front() {
            if report.is_over() {
                self.waiting.pop_front();
                continue;
            }
            let is_free = match &report.items {
                Items::Completions(_) => frame.completions.is_empty(),
                Items::Rejections(_) | Items::Returns(_) => frame.rejections.is_empty(),
                Items::Extensions(_) => frame.extensions.is_empty(),
            };
            let (items, weight) = measure(&report.items);
            (count, bytes) = (count + items, bytes + weight);
            let is_full = self.alone > 0
                || count > self.most_items.unwrap_or(MOST_ITEMS)
                || bytes > MOST_BYTES;
            if !is_free || !reports.is_empty() && is_full {
                break;
            }
            match &report.items {
                Items::Completions(all) => frame.completions.clone_from(all),
                Items::Rejections(all) | Items::Returns(all) => frame.rejections.clone_from(all),
                Items::Extensions(all) => frame.extensions.clone_from(all),
            }
            reports.extend(self.waiting.pop_front());
        }
        reports
    }

    /// Passes the answers to the waiting callers; returns the leases that the session's own
    /// extensions found ended.
    pub(super) fn answered(&mut self, answer: pb::FrameAnswer, now: Instant) -> Vec<EndedLease> {
        let mut ended = Vec::new();
        let Some(sent) = self.sent.remove(&answer.number) else {
            return ended;
        };
        self.alone = self.alone.saturating_sub(sent.reports.len());
        if answer.granted < sent.want {
            self.want_after = Some(now + WANT_AGAIN);
        } else if !sent.reports.is_empty() {
            // The reports have freed capacity.
            self.want_after = None;
        }
        let pb::FrameAnswer {
            mut completions,
            mut rejections,
            mut extensions,
            ..
        } = answer;
        for report in sent.reports {
            let results = std::mem::take(match &report.items {
                Items::Completions(_) => &mut completions,
                Items::Rejections(_) | Items::Returns(_) => &mut rejections,
                Items::Extensions(_) => &mut extensions,
            });
            self.note(&report.items, &results);
            // The caller that requested an extension may have given up.
            if report.reply.is_some() && !report.is_over() {
                report.answer(Ok(Answer::Items(results)));
            } else if let Items::Extensions(all) = report.items {
                let lost = all
                    .into_iter()
                    .zip(results)
                    .filter(|(_, result)| is_lost(result.status()));
                ended.extend(lost.map(|(extension, result)| (extension.lease_token, result)));
            }
        }
        ended
    }

    /// Forgets the tasks whose items have a final answer.
    fn note(&mut self, items: &Items, results: &[pb::ItemResult]) {
        let is_over =
            |result: &pb::ItemResult| is_lost(result.status()) || result.status() == ItemStatus::Ok;
        let leases: Vec<(&str, &str)> = match items {
            Items::Completions(all) => {
                let over = all
                    .iter()
                    .zip(results)
                    .filter(|(_, result)| is_over(result));
                over.map(|(item, _)| (&*item.id, &*item.lease_token))
                    .collect()
            }
            Items::Rejections(all) | Items::Returns(all) => {
                let over = all
                    .iter()
                    .zip(results)
                    .filter(|(_, result)| is_over(result));
                over.map(|(item, _)| (&*item.id, &*item.lease_token))
                    .collect()
            }
            Items::Extensions(all) => {
                let over = all
                    .iter()
                    .zip(results)
                    .filter(|(_, result)| is_lost(result.status()));
                over.map(|(item, _)| (&*item.id, &*item.lease_token))
                    .collect()
            }
        };
        for (id, token) in leases {
            // The worker may have received a newer lease of the task.
            if self.in_hand.get(id).is_some_and(|held| held == token) {
                self.in_hand.remove(id);
            }
        }
    }

    /// Handles the end of a stream: unanswered reports wait again, in the same order. A report that
    /// arrives twice counts once.
    pub(super) fn broke(&mut self) {
        let sent = std::mem::take(&mut self.sent)
            .into_values()
            .flat_map(|sent| sent.reports);
        // Drops the session's own extensions: it creates new ones as needed.
        let again: Vec<_> = sent.filter(|report| report.reply.is_some()).collect();
        self.waiting.retain(|report| report.reply.is_some());
        again
            .into_iter()
            .rev()
            .for_each(|report| self.waiting.push_front(report));
        (self.demand, self.want_after) = (0, None);
    }

    /// Handles a stream that ended because of an invalid report. If only one report is unanswered,
    /// its sender gets the error. If there are several, any of them may be the cause: they are sent
    /// again one by one, ahead of all others.
    pub(super) fn refuse_open(&mut self, error: &Error) {
        let open: Vec<_> = std::mem::take(&mut self.sent)
            .into_values()
            .flat_map(|sent| sent.reports)
            .collect();
        if open.len() == 1 {
            self.alone = self.alone.saturating_sub(1);
            open.into_iter()
                .for_each(|report| report.answer(Err(error.clone())));
            return;
        }
        let items: usize = open.iter().map(|report| measure(&report.items).0).sum();
        self.most_items = Some(self.most_items.unwrap_or(MOST_ITEMS).min(items / 2).max(1));
        self.alone = self.alone.max(open.len());
        open.into_iter()
            .rev()
            .for_each(|report| self.waiting.push_front(report));
    }

    /// Takes all reports, sent or not.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Report> {
        self.broke();
        std::mem::take(&mut self.waiting).into_iter()
    }
}

fn measure(items: &Items) -> (usize, usize) {
    match items {
        Items::Completions(all) => (all.len(), all.iter().map(prost::Message::encoded_len).sum()),
        Items::Rejections(all) | Items::Returns(all) => {
            (all.len(), all.iter().map(|one| one.encoded_len()).sum())
        }
        Items::Extensions(all) => (all.len(), all.iter().map(|one| one.encoded_len()).sum()),
    }
}

/// True if the lease is gone, so that reports of the task no longer count.
pub(super) fn is_lost(status: ItemStatus) -> bool {
    match status {
        ItemStatus::Ok | ItemStatus::TryLater | ItemStatus::Invalid | ItemStatus::Unspecified => {
            false
        }
        ItemStatus::LeaseLost
        | ItemStatus::AlreadyCompleted
        | ItemStatus::UnknownTask
        | ItemStatus::Cancelled => true,
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn report(items: Items) -> (Report, oneshot::Receiver<Result<Answer, Error>>) {
        let (reply, answer) = oneshot::channel();
        (
            Report {
                items,
                reply: Some(reply),
            },
            answer,
        )
    }

    fn completion(id: &str) -> pb::Completion {
        pb::Completion {
            id: id.into(),
            lease_token: format!("token-{id}"),
            ..Default::default()
        }
    }

    fn results(all: &[(&str, ItemStatus)]) -> Vec<pb::ItemResult> {
        let result = |(id, status): &(&str, ItemStatus)| pb::ItemResult {
            id: (*id).into(),
            status: (*status).into(),
            ..Default::default()
        };
        all.iter().map(result).collect()
    }

    fn hold(outbox: &mut Outbox, id: &str, token: &str) {
        outbox.hold(&[pb::LeasedTask {
            id: id.into(),
            lease_token: token.into(),
            ..Default::default()
        }]);
    }

    #[test]
    fn demand_is_asked_for_once_and_never_exceeds_the_room() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        let frame = outbox.next_frame(3, now).unwrap();
        assert_eq!((frame.want, frame.surrender, frame.number), (3, false, 1));
        assert!(outbox.next_frame(3, now).is_none(), "three are asked for");
        assert_eq!(outbox.next_frame(5, now).unwrap().want, 2);
        outbox.answered(
            pb::FrameAnswer {
                number: 1,
                granted: 3,
                ..Default::default()
            },
            now,
        );
        outbox.answered(
            pb::FrameAnswer {
                number: 2,
                granted: 1,
                ..Default::default()
            },
            now,
        );
        outbox.demand = 4;
        assert!(
            outbox.next_frame(5, now).is_none(),
            "taskd did not grant one"
        );
        assert_eq!(outbox.next_frame(5, now + WANT_AGAIN).unwrap().want, 1);
        let frame = outbox.next_frame(2, now).unwrap();
        assert_eq!((frame.want, frame.surrender), (2, true));
        assert!(outbox.next_frame(2, now).is_none(), "it surrenders once");
        outbox.broke();
        assert_eq!(
            outbox.next_frame(2, now).unwrap().want,
            2,
            "the demand begins anew"
        );
    }

    #[test]
    fn reports_without_an_answer_go_again_in_their_order() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        let mut answers = Vec::new();
        for id in ["a", "b"] {
            hold(&mut outbox, id, &format!("token-{id}"));
            let (report, answer) = report(Items::Completions(vec![completion(id)]));
            outbox.report(report);
            answers.push(answer);
        }
        let ids = |frame: pb::WorkerFrame| {
            frame
                .completions
                .into_iter()
                .map(|one| one.id)
                .collect::<Vec<_>>()
        };
        // Both share a kind, so they need frames of their own.
        assert_eq!(ids(outbox.next_frame(0, now).unwrap()), ["a"]);
        assert_eq!(ids(outbox.next_frame(0, now).unwrap()), ["b"]);
        outbox.broke();
        let again = outbox.next_frame(0, now).unwrap();
        let number = again.number;
        assert_eq!(ids(again), ["a"]);
        let completions = results(&[("a", ItemStatus::Ok)]);
        outbox.answered(
            pb::FrameAnswer {
                number,
                completions,
                ..Default::default()
            },
            now,
        );
        assert!(matches!(answers[0].try_recv(), Ok(Ok(Answer::Items(all))) if all[0].id == "a"));
        assert!(answers[1].try_recv().is_err());
        assert_eq!(outbox.holding().collect::<Vec<_>>(), ["b"]);
        drop(answers);
        assert!(outbox.next_frame(0, now).is_none(), "nobody waits for b");
    }

    #[test]
    fn of_reports_that_spoil_the_stream_the_one_to_blame_is_found() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        let refused = Error::Options("wrong".into());
        let extensions = Items::Extensions(vec![pb::Extension {
            id: "a".into(),
            ..Default::default()
        }]);
        let (completions, mut completed) = report(Items::Completions(vec![completion("a")]));
        let (extensions, mut extended) = report(extensions);
        outbox.report(completions);
        outbox.report(extensions);
        let frame = outbox.next_frame(0, now).unwrap();
        assert_eq!((frame.completions.len(), frame.extensions.len()), (1, 1));
        outbox.refuse_open(&refused);
        outbox.broke();
        assert!(
            completed.try_recv().is_err() && extended.try_recv().is_err(),
            "nobody knows which one"
        );
        let frame = outbox.next_frame(0, now).unwrap();
        assert_eq!((frame.completions.len(), frame.extensions.len()), (1, 0));
        assert!(outbox.next_frame(0, now).is_none(), "the other one waits");
        let completions = results(&[("a", ItemStatus::Ok)]);
        outbox.answered(
            pb::FrameAnswer {
                number: frame.number,
                completions,
                ..Default::default()
            },
            now,
        );
        assert!(matches!(completed.try_recv(), Ok(Ok(_))));
        assert_eq!(outbox.next_frame(0, now).unwrap().extensions.len(), 1);
        outbox.refuse_open(&refused);
        assert!(matches!(extended.try_recv(), Ok(Err(_))));
    }

    #[test]
    fn another_lease_of_a_task_stays_in_hand_and_lost_ones_are_told() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        hold(&mut outbox, "a", "newer");
        hold(&mut outbox, "b", "token-b");
        let (report, _answer) = report(Items::Completions(vec![completion("a")]));
        outbox.report(report);
        outbox.extend_all(None);
        let frame = outbox.next_frame(0, now).unwrap();
        assert_eq!((frame.extensions.len(), frame.completions.len()), (2, 1));
        let extensions: Vec<_> = frame
            .extensions
            .iter()
            .map(|one| {
                (
                    &*one.id,
                    if one.id == "b" {
                        ItemStatus::LeaseLost
                    } else {
                        ItemStatus::Ok
                    },
                )
            })
            .collect();
        let (completions, extensions) = (
            results(&[("a", ItemStatus::LeaseLost)]),
            results(&extensions),
        );
        let number = frame.number;
        let lost = outbox.answered(
            pb::FrameAnswer {
                number,
                completions,
                extensions,
                ..Default::default()
            },
            now,
        );
        assert_eq!(
            lost.iter()
                .map(|(token, one)| (&*one.id, &**token))
                .collect::<Vec<_>>(),
            [("b", "token-b")]
        );
        assert_eq!(outbox.holding().collect::<Vec<_>>(), ["a"]);
    }
}
