//! Trees: the list, one tree with what it waits for, and the questions before its changes.

use askama::Template;
use axum::http::StatusCode;

use super::{confirm::Confirm, new_bulk::must_be_typed, tasks::look};
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
    model::{TreeFile, TreePages, TreeQueue, TreeState, TreeView, TreeWait},
};

/// How many trees a page has.
const ROWS: u32 = 50;

/// The parameters of the list.
pub(in crate::ingress::http::ui) const PARAMETERS: &[&str] = &["queue", "state", "since", "cursor"];

/// The fields of the form of the list, without the state: the name, the label, an example.
const FIELDS: [(&str, &str, &str); 2] = [
    ("queue", "Queue of the root", ""),
    ("since", "Begun since", "2026-01-31T09:00:00Z"),
];

#[derive(Template)]
#[template(path = "trees.html", blocks = ["frame"])]
struct Trees {
    head: Head,
    /// The name, the label, an example, the value.
    fields: Vec<(&'static str, &'static str, &'static str, String)>,
    states: Vec<(String, bool)>,
    has_filter: bool,
    rows: Vec<Row>,
    older: String,
}
page!(Trees);

/// The numbers of a tree.
struct Row {
    id: String,
    queue: String,
    state: &'static str,
    class: &'static str,
    shape: &'static str,
    tasks: String,
    open: String,
    completed: String,
    dead: String,
    cancelled: String,
    letters: String,
    opened: Moment,
    ended: Option<Moment>,
}

impl From<&TreeView> for Row {
    fn from(tree: &TreeView) -> Self {
        let (class, shape) = match tree.state {
            TreeState::Open if tree.open == 0 || tree.cancelling => ("warn", "‖"),
            TreeState::Open => ("idle", "◐"),
            TreeState::Done => ("ok", "●"),
            TreeState::Failed => ("bad", "✕"),
        };
        Self {
            id: tree.id.to_string(),
            queue: tree.queue.to_string(),
            state: tree.state.as_str(),
            class,
            shape,
            tasks: format::count(tree.tasks),
            open: format::count(tree.open),
            completed: format::count(tree.completed),
            dead: format::count(tree.dead),
            cancelled: format::count(tree.cancelled),
            letters: format::count(tree.letters),
            opened: Moment::new(tree.opened_unix_ms),
            ended: Moment::some(tree.ended_unix_ms),
        }
    }
}

/// Reads the parameters of the list, which have the names of the API.
fn pages(visit: &Visit) -> Result<TreePages, String> {
    let given: Vec<(&str, &str)> = visit
        .query
        .iter()
        .map(|(name, value)| (&name[..], &value[..]))
        .collect();
    let query = format::query(&given);
    let pages = json::trees::pages_of_query(query.trim_start_matches('?'))?;
    Ok(TreePages {
        limit: ROWS,
        ..pages
    })
}

pub(in crate::ingress::http::ui) async fn list(visit: Visit) -> Answer {
    if let Some(queue) = visit.own_queue().await? {
        return visit.go_to(&format!("trees?queue={}", format::encoded(&queue)));
    }
    let list = visit.api().trees(&visit.caller, pages(&visit)).await?;
    let [queue, state, since] = ["queue", "state", "since"].map(|name| visit.get(name));
    let filter = [("queue", queue), ("state", state), ("since", since)];
    let older = list.next.map(|next| {
        let next = next.to_string();
        let mut query = filter.to_vec();
        query.push(("cursor", &next));
        format!("trees{}", format::query(&query))
    });
    let mut states = vec![(String::new(), state.is_empty())];
    for one in TreeState::ALL {
        let name = one.as_str();
        states.push((name.to_owned(), name.eq_ignore_ascii_case(state)));
    }
    let fields = FIELDS.map(|(name, label, hint)| {
        let value = format::line(visit.get(name));
        (name, label, hint, value)
    });
    let cursor = visit.get("cursor");
    let mut call = filter.to_vec();
    call.push(("cursor", cursor));
    let head = visit
        .head("trees", "Trees")
        .call(format!("v1/trees{}", format::query(&call)));
    visit.show(&Trees {
        head: if cursor.is_empty() { head.live() } else { head },
        fields: fields.into(),
        states,
        has_filter: filter.iter().any(|(_, value)| !value.is_empty()),
        rows: list.trees.iter().map(Row::from).collect(),
        older: older.unwrap_or_default(),
    })
}

#[derive(Template)]
#[template(path = "tree.html", blocks = ["frame"])]
struct Tree {
    head: Head,
    row: Row,
    says: String,
    facts: Vec<(&'static str, String)>,
    /// The queue that gets a task at the end, or nothing.
    then: String,
    is_open: bool,
    has_dead: bool,
    queues: Vec<OfQueue>,
    at_least: bool,
    waits: Vec<Wait>,
}
page!(Tree);

/// The tasks of the tree in a queue: each number with the status that a list has for it.
struct OfQueue {
    queue: String,
    numbers: Vec<(String, &'static str)>,
}

impl From<TreeQueue> for OfQueue {
    fn from(of: TreeQueue) -> Self {
        let numbers = [
            (of.unfinished, "UNFINISHED"),
            (of.completed, "COMPLETED"),
            (of.dead, "DEAD"),
            (of.cancelled, "CANCELLED"),
        ];
        let numbers = numbers.map(|(number, status)| (format::count(number), status));
        Self {
            queue: of.queue.to_string(),
            numbers: numbers.into(),
        }
    }
}

/// A task that the tree waits for.
struct Wait {
    id: String,
    key: String,
    queue: String,
    status: &'static str,
    class: &'static str,
    shape: &'static str,
    says: String,
    created: Moment,
}

impl From<TreeWait> for Wait {
    fn from(wait: TreeWait) -> Self {
        let TreeWait { task, says, next } = wait;
        let (class, shape) = look(task.status);
        let mut says = format::sentence(&says);
        if !next.is_empty() {
            says.push_str(&format!(" Next: {}", format::end(&next)));
        }
        Self {
            id: task.id.to_string(),
            key: format::bytes(&task.key),
            queue: task.queue.to_string(),
            status: task.status.as_str(),
            class,
            shape,
            says,
            created: Moment::new(task.created_unix_ms),
        }
    }
}

pub(in crate::ingress::http::ui) async fn show(Id(id): Id, visit: Visit) -> Answer {
    // Only the numbers are live: what a tree waits for may take long to find.
    let file = if visit.is_frame() {
        let tree = visit.api().tree_numbers(&visit.caller, &id).await?;
        TreeFile {
            tree,
            queues: Vec::new(),
            at_least: false,
            waits_for: Vec::new(),
        }
    } else {
        visit.api().tree(&visit.caller, &id, None).await?
    };
    let TreeFile {
        tree,
        queues,
        at_least,
        waits_for,
    } = file;
    let is_open = tree.state == TreeState::Open;
    let head = visit
        .head("trees", format!("Tree {}", tree.id))
        .call(format!("v1/trees/{}", tree.id));
    visit.show(&Tree {
        head: if is_open { head.live() } else { head },
        row: Row::from(&tree),
        says: says(&tree),
        facts: facts(&tree),
        is_open,
        has_dead: tree.dead > 0,
        queues: queues.into_iter().map(OfQueue::from).collect(),
        at_least,
        waits: waits_for.into_iter().map(Wait::from).collect(),
        then: tree.then.unwrap_or_default(),
    })
}

/// What the state of a tree means.
fn says(tree: &TreeView) -> String {
    let open = format::count(tree.open);
    match tree.state {
        TreeState::Open if tree.cancelling => {
            format!("It is being cancelled: {open} tasks are unfinished, and nothing is added.")
        }
        TreeState::Open if tree.held > 0 => format!(
            "It waits for {open} unfinished tasks, and for {} dead ones, which hold it until they are sent again or \
             purged.",
            format::count(tree.held)
        ),
        TreeState::Open if tree.open == 1 => "It waits for one unfinished task.".to_owned(),
        TreeState::Open => format!("It waits for {open} unfinished tasks."),
        TreeState::Done => "It is over: nothing of it is unfinished.".to_owned(),
        TreeState::Failed => {
            "It is over: nothing of it is unfinished, but not all of its tasks are completed."
                .to_owned()
        }
    }
}

fn facts(tree: &TreeView) -> Vec<(&'static str, String)> {
    let mut facts = vec![
        ("Dead tasks", tree.on_dead.as_str().to_owned()),
        ("Opened again", format!("{} times", tree.epoch)),
    ];
    if tree.late > 0 {
        facts.push(("Surplus reports", format::count(tree.late)));
    }
    if tree.joins > 0 {
        facts.push(("Joins that wait", format::count(tree.joins)));
    }
    if let Some(at) = tree.deadline_unix_ms {
        facts.push(("Deadline", Moment::new(at).text));
    }
    facts
}

/// What can be done with a tree.
#[derive(Clone, Copy)]
enum Change {
    Cancel,
    Retry,
}

impl Change {
    fn read(act: &str) -> Result<Self, Problem> {
        match act {
            "cancel" => Ok(Self::Cancel),
            "retry" => Ok(Self::Retry),
            _ => Err(Problem::new(StatusCode::NOT_FOUND, "there is no such page")),
        }
    }
}

pub(in crate::ingress::http::ui) async fn ask(TwoIds(id, act): TwoIds, visit: Visit) -> Answer {
    let change = Change::read(&act)?;
    let tree = visit.api().tree_numbers(&visit.caller, &id).await?;
    let (title, number, does, verb, kind) = match change {
        Change::Cancel => (
            "Cancel the tree",
            tree.open,
            "unfinished tasks of the tree are cancelled. Nothing is added to it any more, and no dead task holds it.",
            "Cancel the tree",
            "danger",
        ),
        Change::Retry => (
            "Retry the dead tasks of the tree",
            tree.dead,
            "dead tasks of the tree are offered to workers again, and it ends again when they have ended.",
            "Retry",
            "main",
        ),
    };
    let is_possible = match change {
        Change::Cancel => tree.state == TreeState::Open,
        Change::Retry => tree.dead > 0,
    };
    let typed = if is_possible && must_be_typed(number, false) {
        number.to_string()
    } else {
        String::new()
    };
    visit.show(&Confirm {
        head: visit.head("trees", title),
        asks: format!("{} {does}", format::count(number)),
        filter: vec![("Tree".to_owned(), tree.id.to_string())],
        reasons: Vec::new(),
        samples: Vec::new(),
        action: format!("trees/{}/{act}", tree.id),
        hidden: vec![("number".to_owned(), number.to_string())],
        typed,
        verb: if is_possible {
            verb.to_owned()
        } else {
            String::new()
        },
        kind,
        back: format!("trees/{}", tree.id),
    })
}

pub(in crate::ingress::http::ui) async fn act(TwoIds(id, act): TwoIds, visit: Visit) -> Answer {
    let change = Change::read(&act)?;
    let number = visit.field("number");
    let asked: u64 = number
        .parse()
        .map_err(|_| Problem::bad_request("the form has no number"))?;
    if must_be_typed(asked, false) && visit.field("typed").trim() != number {
        let why = format!("the number typed is not {number}, so nothing was changed");
        return Err(Problem::bad_request(why));
    }
    let bulk = match change {
        Change::Cancel => visit.api().cancel_tree(&visit.caller, &id).await?,
        Change::Retry => visit.api().retry_tree(&visit.caller, &id).await?,
    };
    visit.go_to(&format!("bulk/{}?did=start", bulk.id))
}
