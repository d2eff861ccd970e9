//! One task: what happens to it, its attempts, its results side by side, its payload.

use std::collections::BTreeSet;

use askama::Template;
use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use super::{equal::fingerprint, tasks::look};
use crate::{
    api,
    ingress::{
        http::{
            problem::Problem,
            request::Id,
            ui::{
                format::{self, Fact, Moment},
                scene::Head,
                visit::{Answer, Visit, page},
            },
        },
        tally::Excess,
    },
    model::{
        Attempt, AttemptState, Encoding, ExplainTask, TaskFile, TaskId, TaskResult, TaskStatus,
    },
};

/// Longer payloads and results are cut, and can be downloaded.
const SHOWN: usize = 16 << 10;
/// The results of a page: so many, of so many bytes; if they are smaller, they are live.
const MOST_RESULTS: usize = 100;
const MOST_BYTES: usize = 64 << 20;
const LIVE_BYTES: usize = 256 << 10;

#[derive(Template)]
#[template(path = "task.html", blocks = ["frame"])]
struct Task {
    head: Head,
    id: String,
    queue: String,
    key: String,
    status: &'static str,
    class: &'static str,
    shape: &'static str,
    completed: u32,
    replicas: u32,
    priority: &'static str,
    created: Moment,
    says: String,
    reason: String,
    notes: Vec<String>,
    acts: Vec<(&'static str, &'static str)>,
    line: Option<Line>,
    attempts: Vec<Row>,
    results: Results,
    payload: Content,
    /// The tree that it is in, or nothing.
    tree: String,
    facts: Vec<Fact>,
    headers: Vec<(String, String)>,
    done: Vec<(Moment, String, String)>,
}
page!(Task);

/// A row of the table of attempts.
struct Row {
    worker: String,
    state: &'static str,
    class: &'static str,
    from: Option<Moment>,
    until: Option<Moment>,
    expires: String,
    took: String,
    reason: String,
    surplus: bool,
}

/// The time line: a lane for each worker, a bar for each attempt.
struct Line {
    height: u32,
    says: String,
    from: String,
    until: String,
    lanes: Vec<Lane>,
    /// How many workers have no lane.
    left_out: usize,
}

struct Lane {
    y: u32,
    /// The whole name, and what there is room for.
    worker: String,
    shown: String,
    bars: Vec<Bar>,
}

struct Bar {
    class: &'static str,
    x: u32,
    width: u32,
}

/// Bytes as text, perhaps cut.
#[derive(Default)]
struct Content {
    text: String,
    indented: String,
    size: String,
    is_cut: bool,
}

impl Content {
    fn new(content: &[u8], encoding: Encoding) -> Self {
        let cut = &content[..content.len().min(SHOWN)];
        let text = match (encoding, std::str::from_utf8(cut)) {
            (Encoding::Bytes, Err(error)) if error.valid_up_to() + 4 < cut.len() => hex(cut),
            _ => format::lines(cut),
        };
        let is_cut = cut.len() < content.len();
        let whole = std::str::from_utf8(content).ok().filter(|_| !is_cut);
        let indented = whole.and_then(format::indented).unwrap_or_default();
        let indented = format::lines(indented.as_bytes());
        Self {
            indented: if indented == text {
                String::new()
            } else {
                indented
            },
            text,
            size: format::size(content.len()),
            is_cut,
        }
    }
}

/// Bytes that are no text, in hexadecimal, 16 in a line.
fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 3);
    for (at, byte) in bytes.iter().enumerate() {
        if at > 0 {
            text.push(if at % 16 == 0 { '\n' } else { ' ' });
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[derive(Default)]
struct Results {
    count: u32,
    /// They are small, so each frame has them.
    is_live: bool,
    size: String,
    is_cut: bool,
    verdict: String,
    groups: Vec<Group>,
}

/// Results that are equal.
struct Group {
    letter: char,
    /// The name, and how a link has it.
    workers: Vec<(String, String)>,
    content: Content,
    /// They are equal as JSON, but not byte by byte.
    differ: bool,
}

/// The results that are equal so far, and the first of them.
struct Equal {
    fingerprint: [u8; 32],
    workers: Vec<String>,
    content: Content,
    first: Vec<u8>,
    differ: bool,
}

pub(in crate::ingress::http::ui) async fn show(Id(id): Id, visit: Visit) -> Answer {
    let room = |bytes| {
        let room = visit.state.budget.answer(&visit.caller.access, bytes);
        room.map_err(|no_room| Problem::from(Excess::from(no_room)))
    };
    let (file, _room) = if visit.is_frame() {
        let file = visit.api().brief_task_file(&visit.caller, &id).await?;
        (file, None)
    } else {
        let (file, room) = visit.api().task_file(&visit.caller, &id, room).await?;
        (file, Some(room))
    };
    let explanation = explain(&visit, &id).await?;
    let results = read_results(&visit, &id, &file).await?;
    let task = &file.task;
    let (class, shape) = look(task.status);
    let mut says = String::new();
    let mut notes = Vec::new();
    if let Some(found) = explanation {
        says = format::sentence(&found.says);
        if !found.next.is_empty() {
            says.push_str(&format!(" Next: {}", format::end(&found.next)));
        }
        notes.extend(found.notes.iter().map(|note| format::line(note)));
    }
    let is_over = task.status.stored().is_final();
    let did = match visit.get("did") {
        "cancel" => "The task is cancelled.",
        "retry" => "The task is sent again.",
        "priority" => "The priority is changed.",
        "num" => "NUM is changed.",
        "requeue" => "The task is offered again.",
        "later" => "The change is stored. A server does not answer now; taskd applies it later.",
        _ => "",
    };
    let key = format::bytes(&task.key);
    let head = visit
        .head("tasks", key.clone())
        .call(format!("v1/tasks/{}", task.id))
        .did(did);
    let shows_payloads = visit.scene.shows_payloads;
    let mut headers: Vec<(String, String)> = Vec::new();
    if shows_payloads {
        headers.extend(
            file.headers
                .iter()
                .map(|(name, value)| (format::line(name), format::line(value))),
        );
        headers.sort_unstable();
    }
    let payload = if shows_payloads && !visit.is_frame() {
        Content::new(&file.payload, file.payload_encoding)
    } else {
        Content::default()
    };
    let done = file.acts.iter().map(|act| {
        let at = Moment::new(TaskId(act.id).created_unix_ms());
        (at, format::line(&act.who), format::line(&act.what))
    });
    let now = visit.api().now_unix_ms();
    visit.show(&Task {
        head: if is_over { head } else { head.live() },
        id: task.id.to_string(),
        queue: task.queue.to_string(),
        key,
        status: task.status.as_str(),
        class,
        shape,
        completed: task.completed,
        replicas: task.replicas,
        priority: task.priority.as_str(),
        created: Moment::new(task.created_unix_ms),
        says,
        reason: format::line(&task.reason),
        notes,
        acts: acts_on(task.status),
        line: line(&file.history, task.created_unix_ms, now),
        attempts: file
            .history
            .iter()
            .map(|attempt| row(attempt, now))
            .collect(),
        results,
        payload,
        tree: task.tree.map(|tree| tree.to_string()).unwrap_or_default(),
        facts: facts(&file),
        headers,
        done: done.collect(),
    })
}

/// What happens to the task; `None` if a server that knows is away.
async fn explain(visit: &Visit, id: &str) -> Result<Option<crate::model::Explanation>, Problem> {
    let question = ExplainTask {
        id: id.to_owned(),
        ..ExplainTask::default()
    };
    match visit.api().explain(&visit.caller, &question).await {
        Ok(explanation) => Ok(Some(explanation)),
        Err(error) if error.kind() == api::Kind::Unavailable => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn acts_on(status: TaskStatus) -> Vec<(&'static str, &'static str)> {
    match status {
        TaskStatus::Completed => vec![("Change NUM", "num")],
        TaskStatus::Dead | TaskStatus::Cancelled => vec![("Retry", "retry")],
        _ => vec![
            ("Cancel", "cancel"),
            ("Change priority", "priority"),
            ("Change NUM", "num"),
            ("Requeue", "requeue"),
        ],
    }
}

fn facts(file: &TaskFile) -> Vec<Fact> {
    let task = &file.task;
    let mut facts = vec![
        Fact::at("Changed", task.updated_unix_ms),
        Fact::new("Failed attempts", task.attempts.to_string()),
        Fact::new("Leases now", task.leased.to_string()),
    ];
    facts.extend(task.not_before_unix_ms.map(|at| Fact::at("Not before", at)));
    facts.extend(task.deadline_unix_ms.map(|at| Fact::at("Deadline", at)));
    if !task.sequence.is_empty() {
        facts.push(Fact::new("Sequence", format::line(&task.sequence)));
    }
    if !file.traceparent.is_empty() {
        facts.push(Fact::new("Trace", format::line(&file.traceparent)));
    }
    facts
}

fn row(attempt: &Attempt, now_unix_ms: i64) -> Row {
    let (state, class, _) = outcome(attempt.state);
    let end = attempt.until_unix_ms.unwrap_or(now_unix_ms);
    let took = attempt
        .from_unix_ms
        .map(|from| end.saturating_sub(from).unsigned_abs());
    let expires = attempt
        .expires_unix_ms
        .map(|at| format::distance(at, now_unix_ms));
    Row {
        worker: format::line(&attempt.worker),
        state,
        class,
        from: Moment::some(attempt.from_unix_ms),
        until: Moment::some(attempt.until_unix_ms),
        expires: expires.map_or_else(|| "–".to_owned(), |at| format!("expires {at}")),
        took: took.map_or_else(|| "–".to_owned(), format::age),
        reason: format::line(&attempt.reason),
        surplus: attempt.surplus,
    }
}

/// The word, the class and the colour of the bar of an outcome.
fn outcome(state: AttemptState) -> (&'static str, &'static str, &'static str) {
    match state {
        AttemptState::Leased => ("leased", "idle", "bar-leased"),
        AttemptState::Completed => ("completed", "ok", "bar-completed"),
        AttemptState::Rejected => ("rejected", "bad", "bar-rejected"),
        AttemptState::Expired => ("expired", "warn", "bar-expired"),
    }
}

/// Draws the attempts. The table below it says the same.
fn line(history: &[Attempt], created_unix_ms: i64, now_unix_ms: i64) -> Option<Line> {
    const LEFT: i64 = 160;
    const WIDTH: i64 = 840;
    const LANE: u32 = 26;
    const MOST_LANES: usize = 30;
    let until = |attempt: &Attempt| attempt.until_unix_ms.unwrap_or(now_unix_ms);
    let end = history.iter().map(until).max()?;
    let begin = created_unix_ms.min(end - 1);
    let span = (end - begin).max(1);
    let at = |unix_ms: i64| (unix_ms.clamp(begin, end) - begin).saturating_mul(WIDTH) / span;
    let mut lanes: Vec<Lane> = Vec::new();
    let mut without_lane: BTreeSet<&str> = BTreeSet::new();
    for attempt in history {
        let from = at(attempt.from_unix_ms.unwrap_or_else(|| until(attempt)));
        let to = at(until(attempt));
        let (_, _, class) = outcome(attempt.state);
        let bar = Bar {
            class,
            x: u32::try_from(LEFT + from.min(WIDTH - 4)).unwrap_or_default(),
            width: u32::try_from((to - from).clamp(4, WIDTH)).unwrap_or_default(),
        };
        let worker = format::line(&attempt.worker);
        let count = lanes.len();
        match lanes.iter_mut().find(|lane| lane.worker == worker) {
            Some(lane) => lane.bars.push(bar),
            None if count < MOST_LANES => lanes.push(Lane {
                y: u32::try_from(count).unwrap_or_default() * LANE,
                shown: shortened(&worker),
                worker,
                bars: vec![bar],
            }),
            None => {
                without_lane.insert(&attempt.worker);
            }
        }
    }
    let height = u32::try_from(lanes.len()).unwrap_or_default() * LANE + 22;
    Some(Line {
        height,
        says: format!(
            "{} attempts by {} workers within {}",
            history.len(),
            lanes.len() + without_lane.len(),
            format::age(span.unsigned_abs())
        ),
        from: "inserted".to_owned(),
        until: format!("{} later", format::age(span.unsigned_abs())),
        lanes,
        left_out: without_lane.len(),
    })
}

/// The beginning and the end of a long name: those of a deployment differ at the end.
fn shortened(name: &str) -> String {
    const BEGIN: usize = 9;
    const END: usize = 12;
    let count = name.chars().count();
    if count <= BEGIN + 1 + END {
        return name.to_owned();
    }
    let begin: String = name.chars().take(BEGIN).collect();
    let end: String = name.chars().skip(count - END).collect();
    format!("{begin}…{end}")
}

/// Reads the results and groups the equal ones.
async fn read_results(visit: &Visit, id: &str, file: &TaskFile) -> Result<Results, Problem> {
    let count = file.results;
    if count == 0 || !visit.scene.shows_payloads {
        return Ok(Results {
            count,
            is_live: true,
            ..Results::default()
        });
    }
    let mut pages = visit.api().results(&visit.caller, id).await?;
    let is_live = pages.bytes() <= LIVE_BYTES;
    let size = format::size(pages.bytes());
    if visit.is_frame() && !is_live {
        return Ok(Results {
            count,
            size,
            ..Results::default()
        });
    }
    let room = visit
        .state
        .budget
        .answer(&visit.caller.access, pages.largest());
    let _room = room.map_err(Excess::from)?;
    let mut groups: Vec<Equal> = Vec::new();
    let mut read = 0;
    let mut bytes = 0;
    while read < MOST_RESULTS && bytes < MOST_BYTES {
        let Some(page) = pages.next().await? else {
            break;
        };
        for TaskResult {
            worker,
            result,
            encoding,
            ..
        } in page
        {
            read += 1;
            bytes += result.len();
            let fingerprint = fingerprint(&result);
            let worker = worker.clone();
            match groups
                .iter_mut()
                .find(|group| group.fingerprint == fingerprint)
            {
                Some(group) => {
                    group.workers.push(worker);
                    group.differ |= group.first != result[..result.len().min(SHOWN)];
                }
                None => groups.push(Equal {
                    fingerprint,
                    workers: vec![worker],
                    content: Content::new(&result, encoding),
                    first: result[..result.len().min(SHOWN)].to_vec(),
                    differ: false,
                }),
            }
        }
    }
    groups.sort_by_key(|group| std::cmp::Reverse(group.workers.len()));
    let verdict = match (groups.first(), read) {
        (_, 1) => "One result.".to_owned(),
        (Some(first), _) if groups.len() == 1 => format!("All {} agree.", first.workers.len()),
        (Some(first), _) if first.workers.len() == 1 => format!("None of {read} agree."),
        (Some(first), _) => format!("{} of {read} agree.", first.workers.len()),
        (None, _) => String::new(),
    };
    let group = |(at, group): (usize, Equal)| Group {
        letter: char::from_digit(u32::try_from(at + 10).unwrap_or(35).min(35), 36)
            .unwrap_or('z')
            .to_ascii_uppercase(),
        workers: group
            .workers
            .iter()
            .map(|worker| (format::line(worker), format::encoded(worker)))
            .collect(),
        content: group.content,
        differ: group.differ,
    };
    Ok(Results {
        count,
        is_live,
        size,
        is_cut: !pages.is_over(),
        verdict,
        groups: groups.into_iter().enumerate().map(group).collect(),
    })
}

/// The payload as it was inserted.
pub(in crate::ingress::http::ui) async fn payload(Id(id): Id, visit: Visit) -> Answer {
    allowed(&visit)?;
    let room = |bytes| {
        let room = visit.state.budget.answer(&visit.caller.access, bytes);
        room.map_err(|no_room| Problem::from(Excess::from(no_room)))
    };
    let (file, room) = visit.api().task_file(&visit.caller, &id, room).await?;
    let mut answer = download(&format!("{}.payload", file.task.id), file.payload.to_vec());
    answer.extensions_mut().insert(room);
    Ok(answer)
}

/// The result of one worker as it was reported.
pub(in crate::ingress::http::ui) async fn result(Id(id): Id, visit: Visit) -> Answer {
    allowed(&visit)?;
    let worker = visit.get("worker");
    let mut pages = visit.api().results(&visit.caller, &id).await?;
    let room = visit
        .state
        .budget
        .answer(&visit.caller.access, pages.largest());
    let room = room.map_err(Excess::from)?;
    while let Some(page) = pages.next().await? {
        if let Some(found) = page.into_iter().find(|result| result.worker == worker) {
            let mut answer = download(&format!("{id}.result"), found.result.to_vec());
            answer.extensions_mut().insert(room);
            return Ok(answer);
        }
    }
    let why = "this worker has no result of the task";
    Err(Problem::new(StatusCode::NOT_FOUND, why))
}

fn allowed(visit: &Visit) -> Result<(), Problem> {
    if visit.scene.shows_payloads {
        return Ok(());
    }
    let why = "payloads are not shown here (dashboard_payloads = false)";
    Err(Problem::new(StatusCode::FORBIDDEN, why))
}

/// A file that a browser saves rather than shows, whatever is in it.
fn download(name: &str, content: Vec<u8>) -> Response {
    let name: String = name
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || "-.".contains(*c))
        .collect();
    let mut answer = content.into_response();
    let headers = answer.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    let disposition = HeaderValue::try_from(format!("attachment; filename=\"{name}\""));
    headers.insert(
        header::CONTENT_DISPOSITION,
        disposition.expect("the name has no other characters"),
    );
    answer
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn bytes_are_shown_as_text_or_in_hexadecimal() {
        let text = Content::new(b"{\"n\":1970670598291982290}", Encoding::Json);
        assert_eq!(text.text, "{\"n\":1970670598291982290}");
        assert_eq!(text.indented, "{\n  \"n\": 1970670598291982290\n}");
        let bytes = Content::new(&[0xff; 20], Encoding::Bytes);
        assert!(bytes.text.starts_with("ff ff") && bytes.text.contains('\n'));
        let long = Content::new(&vec![b'x'; SHOWN + 1], Encoding::Text);
        assert!(long.is_cut && long.text.len() == SHOWN);
    }

    fn attempt(worker: &str, from: Option<i64>, until: Option<i64>) -> Attempt {
        Attempt {
            worker: worker.to_owned(),
            state: AttemptState::Rejected,
            from_unix_ms: from,
            until_unix_ms: until,
            expires_unix_ms: None,
            attempt: 1,
            reason: String::new(),
            surplus: false,
        }
    }

    #[test]
    fn workers_whose_names_end_differently_have_different_lanes() {
        let workers: Vec<String> = (0..40)
            .map(|n| format!("crawler-deployment-7d9f8-abc{n:02}"))
            .collect();
        let history: Vec<Attempt> = workers
            .iter()
            .map(|worker| attempt(worker, Some(0), Some(10)))
            .collect();
        let line = line(&history, 0, 20).unwrap();
        assert_eq!((line.lanes.len(), line.left_out), (30, 10));
        assert!(line.says.starts_with("40 attempts by 40 workers"));
        assert_eq!(line.lanes[1].shown, "crawler-d…-7d9f8-abc01");
    }

    #[test]
    fn a_line_has_a_lane_for_each_worker() {
        assert!(line(&[], 0, 10).is_none());
        let history = [
            attempt("a", Some(0), Some(500)),
            attempt("b", None, Some(1000)),
            attempt("a", Some(900), None),
        ];
        let line = line(&history, 0, 2000).unwrap();
        assert_eq!(line.lanes.len(), 2);
        let bars: Vec<(u32, u32)> = line.lanes[0]
            .bars
            .iter()
            .map(|bar| (bar.x, bar.width))
            .collect();
        assert_eq!(bars, [(160, 210), (538, 462)]);
        assert_eq!((line.left_out, &line.says[..14]), (0, "3 attempts by "));
        let names: HashMap<&str, usize> = HashMap::from([("a", 2), ("b", 1)]);
        assert!(
            line.lanes
                .iter()
                .all(|lane| names[&lane.worker[..]] == lane.bars.len())
        );
    }
}
