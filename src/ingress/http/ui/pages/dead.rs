//! Dead letters: what taskd gave up on.

use askama::Template;
use axum::http::StatusCode;

use super::confirm::Confirm;
use crate::{
    ingress::{
        http::{
            problem::Problem,
            request::{Id, TwoIds},
            ui::{
                format::{self, Moment},
                scene::Head,
                visit::{Answer, Visit, page},
            },
        },
        json,
    },
    model::{
        ChangeLetters, ChosenLetters, LetterKind, LetterPage, LetterPages, LetterReasons,
        StoredLetter,
    },
};

const ROWS: u32 = 50;
/// How many letters a list of one reason looks at.
const LOOK_AT: u32 = 10_000;
/// How many letters one step purges.
const PURGED_AT_ONCE: u32 = 1000;
/// Above this many letters the number is typed.
const TYPED_FROM: u64 = 100;
const SAMPLES: usize = 3;
/// How many pages of letters one question looks at.
const PAGES_LOOKED_AT: u32 = 10;

pub(in crate::ingress::http::ui) const PARAMETERS: &[&str] =
    &["queue", "kind", "reason", "since", "until", "cursor", "did"];
/// The parameters of the page that asks before a purge.
pub(in crate::ingress::http::ui) const FILTER: &[&str] =
    &["queue", "kind", "reason", "since", "until", "cursor"];

#[derive(Template)]
#[template(path = "dead.html", blocks = ["frame"])]
struct Dead {
    head: Head,
    queue: String,
    kinds: Vec<(&'static str, bool)>,
    reason: String,
    since: String,
    until: String,
    has_filter: bool,
    /// The reasons of the first page.
    reasons: Vec<Reason>,
    looked_at: String,
    rows: Vec<Row>,
    /// How many letters were looked at, if none matched and there are more.
    none_yet: String,
    older: String,
    retry: String,
    purge: String,
}
page!(Dead);

/// A reason that letters share, with links to them and to what can be done with them.
struct Reason {
    text: String,
    count: String,
    first: Moment,
    last: Moment,
    workers: String,
    show: String,
    retry: String,
    purge: String,
    /// How many letters of other reasons begin alike, so that they are retried and purged, too.
    others: String,
}

struct Row {
    id: String,
    reason: String,
    queue: String,
    queue_link: String,
    key: String,
    kind: &'static str,
    attempts: u32,
    at: Moment,
}

fn row(stored: &StoredLetter) -> Row {
    let letter = &stored.letter;
    let key = match &letter.task {
        Some(task) => format::bytes(&task.key),
        None if letter.topic.is_empty() => String::new(),
        None => format::line(&format!(
            "{} {} {}",
            letter.topic, letter.partition, letter.offset
        )),
    };
    Row {
        id: stored.id.to_string(),
        reason: if letter.reason.is_empty() {
            "without a reason".to_owned()
        } else {
            format::line(&letter.reason)
        },
        queue: format::line(&letter.queue),
        queue_link: format::encoded(&letter.queue),
        key,
        kind: stored.kind.as_str(),
        attempts: letter.attempts,
        at: Moment::new(letter.at_unix_ms),
    }
}

/// The filter of the page, as the API reads it.
fn pages(parameters: &[(String, String)], limit: u32) -> Result<LetterPages, String> {
    let known = parameters
        .iter()
        .filter(|(name, value)| FILTER.contains(&&name[..]) && !value.is_empty());
    let query: Vec<(&str, &str)> = known.map(|(name, value)| (&name[..], &value[..])).collect();
    let query = format::query(&query);
    let pages = json::letters::pages_of_query(query.trim_start_matches('?'))?;
    Ok(LetterPages { limit, ..pages })
}

fn filter_query(visit: &Visit, more: &[(&str, &str)]) -> String {
    let mut query: Vec<(&str, &str)> = Vec::new();
    for name in ["queue", "kind", "reason", "since", "until"] {
        query.push((name, visit.get(name)));
    }
    query.extend(more);
    format::query(&query)
}

pub(in crate::ingress::http::ui) async fn list(visit: Visit) -> Answer {
    if let Some(queue) = visit.own_queue().await? {
        return visit.go_to(&format!("dead?queue={}", format::encoded(&queue)));
    }
    let mut page = visit
        .api()
        .letters(&visit.caller, pages(&visit.query, ROWS))
        .await?;
    // A page of the API may have few letters of a reason, or none.
    let has_reason = !visit.get("reason").is_empty();
    let mut looked = ROWS;
    while has_reason && looked < LOOK_AT && page.letters.len() < ROWS as usize {
        let Some(after) = page.next else { break };
        let more = pages(&visit.query, ROWS).map(|pages| LetterPages {
            after: Some(after),
            ..pages
        });
        let more = visit.api().letters(&visit.caller, more).await?;
        page.letters.extend(more.letters);
        page.next = more.next;
        looked += ROWS;
    }
    let none_yet = if page.letters.is_empty() && page.next.is_some() {
        format::count(looked.into())
    } else {
        String::new()
    };
    // Frames leave them out: they are read from many letters.
    let (reasons, looked_at) = if visit.get("cursor").is_empty() && !visit.is_frame() {
        reasons(&visit).await?
    } else {
        (Vec::new(), String::new())
    };
    let older = page.next.map(|next| {
        format!(
            "dead{}",
            filter_query(&visit, &[("cursor", &next.to_string())])
        )
    });
    let chosen = visit.get("kind");
    let mut kinds = vec![("", chosen.is_empty())];
    kinds.extend(LetterKind::ALL.map(|kind| (kind.as_str(), kind.as_str() == chosen)));
    // Only tasks are changed by a bulk change, whose filter needs a queue.
    let is_of_tasks = may_retry_tasks(&visit);
    let retry = if is_of_tasks && !visit.get("queue").is_empty() {
        let query = format::query(&[
            ("what", "retry"),
            ("status", "DEAD"),
            ("queue", visit.get("queue")),
            ("reason", visit.get("reason")),
        ]);
        format!("bulk/new{query}")
    } else {
        String::new()
    };
    let did = match visit.get("did") {
        "retry" => "The letter is sent again.",
        "purge" => "The letter is purged.",
        _ => "",
    };
    let api_query = filter_query(&visit, &[("cursor", visit.get("cursor"))]);
    let head = visit
        .head("dead", "Dead letters")
        .call(format!("v1/dead-letters{api_query}"))
        .did(did);
    visit.show(&Dead {
        head: if visit.get("cursor").is_empty() && !has_reason {
            head.live()
        } else {
            head
        },
        queue: format::line(visit.get("queue")),
        kinds,
        reason: format::line(visit.get("reason")),
        since: format::line(visit.get("since")),
        until: format::line(visit.get("until")),
        has_filter: !filter_query(&visit, &[]).is_empty(),
        reasons,
        looked_at,
        rows: page.letters.iter().map(row).collect(),
        none_yet,
        older: older.unwrap_or_default(),
        retry,
        purge: format!("dead/purge{}", filter_query(&visit, &[])),
    })
}

/// Whether dead tasks can be chosen as these letters are. `since` and `until` of tasks are about
/// their inserts.
fn may_retry_tasks(visit: &Visit) -> bool {
    matches!(visit.get("kind"), "" | "task")
        && visit.get("since").is_empty()
        && visit.get("until").is_empty()
}

/// Counts the reasons. A filter by reason needs a queue, so without one there are no links.
async fn reasons(visit: &Visit) -> Result<(Vec<Reason>, String), Problem> {
    let found = pages(&visit.query, 0);
    let found = visit.api().letter_reasons(&visit.caller, found).await?;
    let has_queue = !visit.get("queue").is_empty();
    let mut list = Vec::new();
    for reason in &found.reasons {
        let alike = found.reasons.iter().filter(|other| {
            other.reason != reason.reason && other.reason.starts_with(&reason.prefix)
        });
        let others: u64 = alike.map(|other| other.count).sum();
        let of_reason = [
            ("queue", visit.get("queue")),
            ("kind", visit.get("kind")),
            ("reason", &reason.prefix),
            ("since", visit.get("since")),
            ("until", visit.get("until")),
        ];
        let may_link = has_queue && !reason.prefix.is_empty();
        let link = |path: String| if may_link { path } else { String::new() };
        let of_tasks = [
            ("what", "retry"),
            ("status", "DEAD"),
            ("queue", visit.get("queue")),
            ("reason", &reason.prefix),
        ];
        let retry = if may_retry_tasks(visit) {
            link(format!("bulk/new{}", format::query(&of_tasks)))
        } else {
            String::new()
        };
        list.push(Reason {
            text: if reason.reason.is_empty() {
                "without a reason".to_owned()
            } else {
                format::line(&reason.reason)
            },
            count: format::count(reason.count),
            first: Moment::new(reason.first_unix_ms),
            last: Moment::new(reason.last_unix_ms),
            workers: format::line(&reason.workers.join(", ")),
            show: link(format!("dead{}", format::query(&of_reason))),
            retry,
            purge: link(format!("dead/purge{}", format::query(&of_reason))),
            others: if may_link && others > 0 {
                format::count(others)
            } else {
                String::new()
            },
        });
    }
    let looked_at = if found.at_least {
        format::count(found.looked_at)
    } else {
        String::new()
    };
    Ok((list, looked_at))
}

#[derive(Template)]
#[template(path = "letter.html", blocks = ["frame"])]
struct Letter {
    head: Head,
    id: String,
    kind: &'static str,
    at: Moment,
    facts: Vec<(&'static str, String)>,
    history: Vec<(String, Moment, String)>,
    content: String,
}
page!(Letter);

/// Longer contents are cut; the API has all.
const SHOWN: usize = 16 << 10;

pub(in crate::ingress::http::ui) async fn show(Id(id): Id, visit: Visit) -> Answer {
    let stored = visit.api().letter(&visit.caller, &id).await?;
    let Row {
        id,
        reason,
        queue,
        key,
        kind,
        attempts,
        at,
        ..
    } = row(&stored);
    let letter = &stored.letter;
    let mut facts = Vec::new();
    for (name, value) in [
        ("Queue", queue),
        ("Key", key),
        ("Attempts", attempts.to_string()),
    ] {
        if !value.is_empty() {
            facts.push((name, value));
        }
    }
    if let Some(parent) = letter.parent_id {
        facts.push(("Discovered by", parent.to_string()));
    }
    if letter.incomplete {
        facts.push(("Incomplete", "parts of the task were left out".to_owned()));
    }
    let history = letter.history.iter().map(|failure| {
        let at = Moment::new(failure.at_unix_ms);
        (
            format::line(&failure.worker),
            at,
            format::line(&failure.reason),
        )
    });
    let content = match &letter.task {
        Some(task) => &task.payload[..],
        None => &letter.value[..],
    };
    let content = if visit.scene.shows_payloads {
        format::lines(&content[..content.len().min(SHOWN)])
    } else {
        String::new()
    };
    visit.show(&Letter {
        head: visit
            .head("dead", reason)
            .call(format!("v1/dead-letters/{id}")),
        id,
        kind,
        at,
        facts,
        history: history.collect(),
        content,
    })
}

/// Asks before one letter is changed.
pub(in crate::ingress::http::ui) async fn ask(TwoIds(id, act): TwoIds, visit: Visit) -> Answer {
    let (title, asks, kind) = words(&act)?;
    let stored = visit.api().letter(&visit.caller, &id).await?;
    let row = row(&stored);
    let text = format!("{} {}", row.queue, row.key);
    visit.show(&Confirm {
        head: visit.head("dead", title),
        asks: asks.to_owned(),
        filter: vec![
            ("Letter".to_owned(), text),
            ("Reason".to_owned(), row.reason),
        ],
        reasons: Vec::new(),
        samples: Vec::new(),
        action: format!("dead/{}/{act}", row.id),
        hidden: Vec::new(),
        typed: String::new(),
        verb: title.to_owned(),
        kind,
        back: format!("dead/{}", row.id),
    })
}

fn words(act: &str) -> Result<(&'static str, &'static str, &'static str), Problem> {
    match act {
        "retry" => Ok((
            "Retry the letter",
            "Its task is offered to workers again.",
            "main",
        )),
        "purge" => Ok((
            "Purge the letter",
            "It is removed for good. Of a dead task only the key stays, so the task is not inserted again.",
            "danger",
        )),
        _ => Err(Problem::new(StatusCode::NOT_FOUND, "there is no such page")),
    }
}

pub(in crate::ingress::http::ui) async fn act(TwoIds(id, act): TwoIds, visit: Visit) -> Answer {
    words(&act)?;
    let change = ChosenLetters::new(vec![id], None).map(|chosen| ChangeLetters {
        chosen,
        dry_run: false,
        yes: true,
    });
    let changed = if act == "retry" {
        visit.api().retry_letters(&visit.caller, change).await?
    } else {
        visit.api().purge_letters(&visit.caller, change).await?
    };
    if let Some((_, why)) = changed.failed.first() {
        return Err(Problem::new(StatusCode::CONFLICT, why.clone()));
    }
    visit.go_to(&format!("dead?did={act}"))
}

/// The most frequent reasons, and how many letters have each. The last one stands for the others.
pub(super) fn named(reasons: &LetterReasons) -> Vec<(String, String)> {
    const NAMED: usize = 10;
    let some = |count| match reasons.at_least {
        true => format!("at least {}", format::count(count)),
        false => format::count(count),
    };
    let mut named: Vec<(String, String)> = Vec::new();
    for reason in reasons.reasons.iter().take(NAMED) {
        let text = if reason.reason.is_empty() {
            "without a reason".to_owned()
        } else {
            format::line(&reason.reason)
        };
        named.push((some(reason.count), text));
    }
    let shown: u64 = reasons
        .reasons
        .iter()
        .take(NAMED)
        .map(|one| one.count)
        .sum();
    if reasons.looked_at > shown {
        let rest = some(reasons.looked_at - shown);
        named.push((rest, "of other reasons".to_owned()));
    }
    named
}

/// Asks before the letters of a filter are purged, which goes page by page.
pub(in crate::ingress::http::ui) async fn ask_purge(visit: Visit) -> Answer {
    purge_page(&visit, &visit.query, String::new()).await
}

/// Finds the next letters that match. A page of the API may have none of a reason.
async fn next_letters(
    visit: &Visit,
    parameters: &[(String, String)],
) -> Result<LetterPage, Problem> {
    let mut found = pages(parameters, PURGED_AT_ONCE);
    for _ in 1..PAGES_LOOKED_AT {
        let page = visit.api().letters(&visit.caller, found.clone()).await?;
        if !page.letters.is_empty() || page.next.is_none() {
            return Ok(page);
        }
        found = found.map(|pages| LetterPages {
            after: page.next,
            ..pages
        });
    }
    Ok(visit.api().letters(&visit.caller, found).await?)
}

/// Shows the next letters that match, and asks. The form has their ids, so that no other letter is
/// purged.
async fn purge_page(visit: &Visit, parameters: &[(String, String)], before: String) -> Answer {
    let page = next_letters(visit, parameters).await?;
    let count = page.letters.len() as u64;
    let samples = page.letters.iter().take(SAMPLES).map(|stored| {
        let row = row(stored);
        (
            format!("{} {} {}", row.queue, row.key, row.reason),
            format!("dead/{}", row.id),
        )
    });
    let mut reasons = LetterReasons::default();
    reasons.count(&page.letters);
    reasons.finish();
    let number = format::count(count);
    let more = if page.next.is_some() {
        "; there may be more after these"
    } else {
        ""
    };
    let given: Vec<(String, String)> = parameters
        .iter()
        .filter(|(name, value)| FILTER.contains(&&name[..]) && !value.is_empty())
        .filter(|(name, _)| name != "cursor")
        .cloned()
        .collect();
    let ids: Vec<String> = page.letters.iter().map(|one| one.id.to_string()).collect();
    let mut hidden = given.clone();
    hidden.push(("ids".to_owned(), ids.join(",")));
    if let Some(next) = page.next {
        hidden.push(("cursor".to_owned(), next.to_string()));
    }
    let shown = given.into_iter();
    let shown = shown.map(|(name, value)| (name, format::line(&value)));
    visit.show(&Confirm {
        head: visit.head("dead", "Purge dead letters"),
        asks: format!("{before}{number} dead letters match, and are removed for good{more}."),
        filter: shown.collect(),
        reasons: named(&reasons),
        samples: samples.collect(),
        action: "dead/purge".to_owned(),
        hidden,
        typed: if count > TYPED_FROM {
            count.to_string()
        } else {
            String::new()
        },
        verb: if count > 0 {
            format!("Purge {number} letters")
        } else {
            String::new()
        },
        kind: "danger",
        back: "dead".to_owned(),
    })
}

pub(in crate::ingress::http::ui) async fn purge(visit: Visit) -> Answer {
    let ids = visit.field("ids").split(',').filter(|id| !id.is_empty());
    let ids: Vec<String> = ids.map(str::to_owned).collect();
    let count = ids.len() as u64;
    if count > TYPED_FROM && visit.field("typed").trim() != count.to_string() {
        let why = format!("the number typed is not {count}, so nothing was purged");
        return Err(Problem::bad_request(why));
    }
    let change = ChosenLetters::new(ids, None).map(|chosen| ChangeLetters {
        chosen,
        dry_run: false,
        yes: true,
    });
    let changed = visit.api().purge_letters(&visit.caller, change).await?;
    let stayed = match changed.failed.first() {
        Some((_, why)) => format!(" {} stay: {}.", changed.failed.len(), format::line(why)),
        None => String::new(),
    };
    let before = format!("{} are purged.{stayed} ", format::count(changed.changed));
    if visit.field("cursor").is_empty() {
        let none = "There are no more.";
        return visit.show(&Confirm {
            head: visit.head("dead", "Purge dead letters"),
            asks: format!("{before}{none}"),
            filter: Vec::new(),
            reasons: Vec::new(),
            samples: Vec::new(),
            action: "dead/purge".to_owned(),
            hidden: Vec::new(),
            typed: String::new(),
            verb: String::new(),
            kind: "danger",
            back: "dead".to_owned(),
        });
    }
    purge_page(&visit, &visit.form, before).await
}
