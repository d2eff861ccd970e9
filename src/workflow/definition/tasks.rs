//! Reads tasks: what all have in common, and each kind.

use std::collections::HashMap;

use serde_json::Value;

use super::{
    Case, Catch, Emit, ErrorFilter, For, Fork, Place, Task, TaskKind, Then, Try,
    functions::MOST_TASK_LEVELS,
    node::Data,
    parts::{Names, error_fields},
    reader::{Fields, Reader, Scope, Spot, is_expression},
};
use crate::model::{ECHO, shorten};

/// The fields of every task.
const COMMON: [&str; 7] = [
    "if", "input", "output", "export", "timeout", "then", "metadata",
];
/// The fields that make a task of a kind, and those that only tasks of this kind have.
const KINDS: [(&str, &[&str]); 12] = [
    ("call", &["with"]),
    ("do", &[]),
    ("emit", &[]),
    ("for", &["while", "do"]),
    ("fork", &[]),
    ("listen", &["foreach"]),
    ("raise", &[]),
    ("run", &[]),
    ("set", &[]),
    ("switch", &[]),
    ("try", &["catch"]),
    ("wait", &[]),
];

/// Reads tasks.
pub(super) struct Tasks<'r, 'n> {
    pub(super) reader: &'r mut Reader,
    pub(super) names: &'r Names<'n>,
    /// How many tasks the next one is in.
    levels: usize,
}

impl<'r, 'n> Tasks<'r, 'n> {
    pub(super) fn new(reader: &'r mut Reader, names: &'r Names<'n>) -> Self {
        Self {
            reader,
            names,
            levels: 0,
        }
    }

    /// Reads a list of tasks with their names. `None` only if it is no list.
    pub(super) fn list(&mut self, what: &str, spot: &Spot<'_>, scope: &Scope) -> Option<Vec<Task>> {
        let items = self.reader.list(what, spot)?;
        if self.levels == MOST_TASK_LEVELS {
            let says = format!("tasks are more than {MOST_TASK_LEVELS} deep in each other");
            self.reader.wrong(spot, says);
            return None;
        }
        let mut named = Vec::new();
        for item in &items {
            named.extend(self.reader.named("a task", item));
        }
        let mut places: HashMap<&str, usize> = HashMap::new();
        for (place, (name, spot)) in named.iter().enumerate() {
            if places.contains_key(name) {
                let name = shorten(name, ECHO);
                let says = format!("task {name:?} is in this list already: two of one name");
                self.reader.wrong_name(spot, says);
            } else {
                places.insert(name, place);
            }
        }
        self.levels += 1;
        let tasks = named
            .iter()
            .filter_map(|(name, spot)| self.task(name, spot, scope, &places))
            .collect();
        self.levels -= 1;
        Some(tasks)
    }

    /// Reads a task of `use.functions`.
    pub(super) fn function(&mut self, name: &str, spot: &Spot<'_>) -> Option<Task> {
        self.task(name, spot, &Scope::new(), &HashMap::new())
    }

    fn task(
        &mut self,
        name: &str,
        spot: &Spot<'_>,
        scope: &Scope,
        places: &HashMap<&str, usize>,
    ) -> Option<Task> {
        let fields = self.reader.object("a task", spot)?;
        let kind = self.kind(&fields);
        let mut common = Task {
            name: name.to_owned(),
            place: place(spot),
            if_: None,
            input: None,
            output: None,
            export: None,
            timeout: None,
            then: None,
            metadata: serde_json::Map::new(),
            // What it really is comes below.
            kind: TaskKind::Do(Vec::new()),
        };
        for (name, spot) in fields.all() {
            match name {
                "if" => common.if_ = self.reader.condition("if", &spot, scope),
                "input" => common.input = self.reader.input(&spot, scope),
                "output" => common.output = self.reader.output(&spot, scope),
                "export" => common.export = self.reader.export(&spot, scope),
                "timeout" => common.timeout = self.reader.timeout(&spot, self.names, scope),
                "then" => common.then = self.then(&spot, places),
                "metadata" => {
                    common.metadata = self.reader.map("metadata", &spot).unwrap_or_default();
                }
                _ => {}
            }
        }
        let kind = kind?;
        if !matches!(kind, "call" | "listen" | "run")
            && let Some(spot) = fields
                .get("metadata")
                .and_then(|metadata| field(&metadata, "taskd"))
        {
            self.reader
                .wrong_name(&spot, "metadata.taskd belongs to tasks that call something");
        }
        let main = fields.get(kind)?;
        common.kind = match kind {
            "call" => self.call(&fields, &main, scope)?,
            "do" => TaskKind::Do(self.list("do", &main, scope)?),
            "emit" => self.emit(&main, scope)?,
            "for" => self.for_(&fields, &main, scope)?,
            "fork" => self.fork(&main, scope)?,
            "raise" => self.raise(&main, scope)?,
            "set" => self.set(&main, scope)?,
            "switch" => self.switch(&main, scope, places)?,
            "try" => self.try_(&fields, &main, scope, places)?,
            "wait" => TaskKind::Wait(self.reader.period("wait", &main, scope)?),
            "listen" => {
                let instead = "a call of a function waits for the result of a worker";
                self.reader.not_yet(&main, "listen", instead);
                return None;
            }
            _ => {
                let instead = "call a function: it is a task for your own workers";
                self.reader.not_yet(&main, "run", instead);
                return None;
            }
        };
        Some(common)
    }

    /// Finds out what kind of task it is, and refuses the fields that tasks of this kind do not
    /// have.
    fn kind(&mut self, fields: &Fields<'_>) -> Option<&'static str> {
        let all: Vec<&str> = KINDS.iter().map(|(kind, _)| *kind).collect();
        let mut kinds: Vec<&'static str> = Vec::new();
        for (name, _) in fields.all() {
            kinds.extend(all.iter().find(|kind| **kind == name));
        }
        // A loop has its tasks in `do`.
        if kinds.contains(&"for") {
            kinds.retain(|kind| *kind != "do");
        }
        if let [first, others @ ..] = kinds.as_slice() {
            for other in others {
                if let Some(spot) = fields.get(other) {
                    let says = format!("a task is of one kind; this one has {first} and {other}");
                    self.reader.wrong_name(&spot, says);
                }
            }
        }
        let kind = kinds.first().copied();
        let own = KINDS.iter().find(|(name, _)| Some(*name) == kind);
        let own = own.map_or(&[][..], |(_, own)| own);
        let mut has_unknown = false;
        for (name, spot) in fields.all() {
            if COMMON.contains(&name) || all.contains(&name) || own.contains(&name) {
                continue;
            }
            has_unknown = true;
            let other = KINDS.iter().find(|(_, own)| own.contains(&name));
            match (other, kind) {
                (Some((other, _)), Some(kind)) => {
                    let says = format!("{name} belongs to {other}; this task is {kind}");
                    self.reader.wrong_name(&spot, says);
                }
                (Some((other, _)), None) => {
                    let says = format!("{name} belongs to {other}, which is missing");
                    self.reader.wrong_name(&spot, says);
                }
                (None, Some(kind)) => {
                    let known: Vec<&str> =
                        [kind].iter().chain(own).chain(&COMMON).copied().collect();
                    self.reader.unknown(&spot, name, &known);
                }
                (None, None) => {
                    let near = self.reader.near(name, all.iter().copied());
                    let name = shorten(name, ECHO);
                    let known = all.join(", ");
                    let says = format!("unknown kind of task {name:?}; {near}expected {known}");
                    self.reader.wrong_name(&spot, says);
                }
            }
        }
        if kind.is_none() && !has_unknown {
            let says = format!("the task is of no kind; expected one of {}", all.join(", "));
            self.reader.wrong_name(&fields.spot, says);
        }
        if kinds.len() > 1 { None } else { kind }
    }

    fn then(&mut self, spot: &Spot<'_>, places: &HashMap<&str, usize>) -> Option<Then> {
        let text = self.reader.text("then", spot)?;
        match text {
            "continue" => return Some(Then::Continue),
            "exit" => return Some(Then::Exit),
            "end" => return Some(Then::End),
            _ => {}
        }
        match places.get(text) {
            Some(place) => Some(Then::Task(text.to_owned(), *place)),
            None => {
                let near = self.reader.near(text, places.keys().copied());
                let text = shorten(text, ECHO);
                let says = format!(
                    "then is {text:?}; {near}expected continue, exit, end or a task of the same list"
                );
                self.reader.wrong(spot, says);
                None
            }
        }
    }

    fn set(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<TaskKind> {
        match &spot.node.data {
            Data::Text(_) => {}
            Data::Object(entries) if entries.is_empty() => {
                self.reader
                    .wrong(spot, "set must have a field: set: { name: value }");
            }
            Data::Object(_) => {}
            _ => {
                let kind = spot.node.kind();
                let says = format!("set must be an object or an expression; this is {kind}");
                self.reader.wrong(spot, says);
                return None;
            }
        }
        self.reader.check_templates(spot, scope);
        Some(TaskKind::Set(spot.node.to_value()))
    }

    fn switch(
        &mut self,
        spot: &Spot<'_>,
        scope: &Scope,
        places: &HashMap<&str, usize>,
    ) -> Option<TaskKind> {
        let items = self.reader.list("switch", spot)?;
        if items.is_empty() {
            self.reader.wrong(spot, "switch must have a case");
        }
        let mut cases: Vec<Case> = Vec::new();
        for item in &items {
            let Some((name, spot)) = self.reader.named("a case", item) else {
                continue;
            };
            let shown = shorten(name, ECHO);
            if cases.iter().any(|case| case.name == name) {
                let says = format!("case {shown:?} is there already: two of one name");
                self.reader.wrong_name(&spot, says);
            }
            if let Some(default) = cases.iter().find(|case| case.when.is_none()) {
                let says = format!(
                    "case {shown:?} is never reached: {:?} before it has no when",
                    default.name
                );
                self.reader.wrong_name(&spot, says);
            }
            cases.extend(self.case(name, &spot, scope, places));
        }
        Some(TaskKind::Switch(cases))
    }

    fn case(
        &mut self,
        name: &str,
        spot: &Spot<'_>,
        scope: &Scope,
        places: &HashMap<&str, usize>,
    ) -> Option<Case> {
        let fields = self.reader.object("a case", spot)?;
        self.reader.only(&fields, &["when", "then"]);
        let when = fields
            .get("when")
            .map(|spot| self.reader.condition("when", &spot, scope));
        let then = match fields.get("then") {
            Some(spot) => self.then(&spot, places),
            None => {
                let example = "continue, exit, end or the name of a task";
                self.reader.missing(&fields, "then", example);
                None
            }
        };
        Some(Case {
            name: name.to_owned(),
            place: place(spot),
            when: match when {
                Some(when) => Some(when?),
                None => None,
            },
            then: then?,
        })
    }

    fn for_(&mut self, fields: &Fields<'_>, spot: &Spot<'_>, scope: &Scope) -> Option<TaskKind> {
        let mut each = "item".to_owned();
        let mut at = "index".to_owned();
        let mut in_ = None;
        if let Some(inner) = self.reader.object("for", spot) {
            self.reader.only(&inner, &["each", "in", "at"]);
            if let Some(spot) = inner.get("each") {
                each = self.reader.variable("each", &spot).unwrap_or(each);
            }
            if let Some(spot) = inner.get("at") {
                at = self.reader.variable("at", &spot).unwrap_or(at);
                if at == each {
                    self.reader.wrong(&spot, "each and at have one name");
                }
            }
            in_ = match inner.get("in") {
                Some(spot) => self.collection(&spot, scope),
                None => {
                    self.reader
                        .missing(&inner, "in", "an expression, such as .items");
                    None
                }
            };
        }
        let mut inner = scope.clone();
        inner.extend([each.clone(), at.clone()]);
        let while_ = fields
            .get("while")
            .and_then(|spot| self.reader.condition("while", &spot, &inner));
        let do_ = match fields.get("do") {
            Some(spot) => self.list("do", &spot, &inner),
            None => {
                self.reader.missing(fields, "do", "the tasks of each round");
                None
            }
        };
        Some(TaskKind::For(For {
            each,
            in_: in_?,
            at,
            while_,
            do_: do_?,
        }))
    }

    fn collection(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<Value> {
        match &spot.node.data {
            Data::Text(_) => {
                self.reader.condition("in", spot, scope)?;
            }
            Data::List(_) => {
                for item in spot.items().unwrap_or_default() {
                    if !item.is_object() {
                        let says = "in must be a list of objects; of other values make an expression: '${ [1, 2] }'";
                        self.reader.wrong(&item, says);
                    }
                }
                self.reader.check_templates(spot, scope);
            }
            _ => {
                let kind = spot.node.kind();
                let says = format!("in must be an expression or a list; this is {kind}");
                self.reader.wrong(spot, says);
                return None;
            }
        }
        Some(spot.node.to_value())
    }

    fn fork(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<TaskKind> {
        let fields = self.reader.object("fork", spot)?;
        self.reader.only(&fields, &["branches", "compete"]);
        let compete = fields
            .get("compete")
            .and_then(|spot| self.reader.flag("compete", &spot));
        let Some(spot) = fields.get("branches") else {
            self.reader
                .missing(&fields, "branches", "the list of the tasks");
            return None;
        };
        let branches = self.list("branches", &spot, scope)?;
        if spot.items().is_some_and(|items| items.is_empty()) {
            self.reader.wrong(&spot, "branches must have a task");
        }
        for branch in &branches {
            if matches!(branch.then, Some(Then::Task(..))) {
                let says = "a branch goes to no other: its then may be continue, exit or end";
                self.reader.wrong_at(&branch.place, says.to_owned());
            }
        }
        Some(TaskKind::Fork(Fork {
            branches,
            compete: compete.unwrap_or_default(),
        }))
    }

    fn raise(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<TaskKind> {
        let fields = self.reader.object("raise", spot)?;
        self.reader.only(&fields, &["error"]);
        let Some(spot) = fields.get("error") else {
            let example = "error: { type: …, status: 400 }, or a name of use.errors";
            self.reader.missing(&fields, "error", example);
            return None;
        };
        let error = self.reader.error(&spot, self.names, scope)?;
        Some(TaskKind::Raise(error))
    }

    fn try_(
        &mut self,
        fields: &Fields<'_>,
        spot: &Spot<'_>,
        scope: &Scope,
        places: &HashMap<&str, usize>,
    ) -> Option<TaskKind> {
        let try_ = self.list("try", spot, scope);
        let catch = match fields.get("catch") {
            Some(spot) => self.catch(&spot, scope, places),
            None => {
                self.reader
                    .missing(fields, "catch", "catch: {} catches every error");
                None
            }
        };
        Some(TaskKind::Try(Try {
            try_: try_?,
            catch: catch?,
        }))
    }

    fn catch(
        &mut self,
        spot: &Spot<'_>,
        scope: &Scope,
        places: &HashMap<&str, usize>,
    ) -> Option<Catch> {
        let fields = self.reader.object("catch", spot)?;
        let known = ["errors", "as", "when", "exceptWhen", "retry", "do", "then"];
        self.reader.only(&fields, &known);
        let as_ = fields
            .get("as")
            .and_then(|spot| self.reader.variable("as", &spot));
        let as_ = as_.unwrap_or_else(|| "error".to_owned());
        let mut inner = scope.clone();
        inner.push(as_.clone());
        let mut catch = Catch {
            place: place(spot),
            errors: None,
            as_,
            when: None,
            except_when: None,
            retry: None,
            do_: None,
            then: None,
        };
        for (name, spot) in fields.all() {
            match name {
                "errors" => catch.errors = self.filter(&spot),
                "when" => catch.when = self.reader.condition("when", &spot, &inner),
                "exceptWhen" => {
                    catch.except_when = self.reader.condition("exceptWhen", &spot, &inner);
                }
                "retry" => catch.retry = self.reader.retry(&spot, self.names, &inner),
                "do" => catch.do_ = self.list("do", &spot, &inner),
                "then" => catch.then = self.then(&spot, places),
                _ => {}
            }
        }
        Some(catch)
    }

    fn filter(&mut self, spot: &Spot<'_>) -> Option<ErrorFilter> {
        let fields = self.reader.object("errors", spot)?;
        self.reader.only(&fields, &["with"]);
        let with = fields.get("with")?;
        let fields = self.reader.object("errors.with", &with)?;
        self.reader.only(&fields, error_fields(&fields));
        if fields.entries.is_empty() {
            let says = "errors.with must have type, status, instance, title or detail";
            self.reader.wrong(&with, says);
        }
        let mut filter = ErrorFilter::default();
        for (name, spot) in fields.all() {
            match name {
                "status" => filter.status = self.reader.whole("status", &spot),
                "type" => filter.type_ = self.reader.owned("type", &spot),
                "instance" => filter.instance = self.reader.owned("instance", &spot),
                "title" => filter.title = self.reader.owned("title", &spot),
                "detail" | "details" => filter.detail = self.reader.owned("detail", &spot),
                _ => {}
            }
        }
        Some(filter)
    }

    fn emit(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<TaskKind> {
        let fields = self.reader.object("emit", spot)?;
        self.reader.only(&fields, &["event"]);
        let Some(event) = fields.get("event") else {
            let example = "event: { with: { type: … } }";
            self.reader.missing(&fields, "event", example);
            return None;
        };
        let fields = self.reader.object("event", &event)?;
        self.reader.only(&fields, &["with"]);
        let Some(with) = fields.get("with") else {
            self.reader.missing(&fields, "with", "with: { type: … }");
            return None;
        };
        let fields = self.reader.object("with", &with)?;
        for (name, spot) in fields.all() {
            self.attribute(name, &spot, scope);
        }
        if fields.get("type").is_none() {
            let example = "type: com.example.order.placed.v1";
            self.reader.missing(&fields, "type", example);
        }
        let with = self.reader.map("with", &with)?;
        Some(TaskKind::Emit(Emit { with }))
    }

    /// Checks an attribute of an event.
    fn attribute(&mut self, name: &str, spot: &Spot<'_>, scope: &Scope) {
        match name {
            "data" => self.reader.check_templates(spot, scope),
            "source" | "dataschema" => {
                self.reader.uri(name, spot, scope);
            }
            "id" | "type" | "subject" | "datacontenttype" => {
                self.reader.template(name, spot, scope);
            }
            "time" => {
                let text = self.reader.template("time", spot, scope);
                if let Some(text) = text.filter(|text| !is_expression(text))
                    && !looks_like_a_time(&text)
                {
                    let says = "time must be a time of RFC 3339, such as 2026-01-31T12:00:00Z";
                    self.reader.wrong(spot, says);
                }
            }
            "specversion" => {
                if spot.text() != Some("1.0") {
                    self.reader.wrong(spot, "specversion must be '1.0'");
                }
            }
            _ => {
                let is_plain = name
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
                if !is_plain || name.is_empty() {
                    let name = shorten(name, ECHO);
                    let says = format!(
                        "attribute {name:?}: CloudEvents has names of a-z 0-9; put other data into data"
                    );
                    self.reader.wrong_name(spot, says);
                }
                match &spot.node.data {
                    Data::Text(_) | Data::Number(_) | Data::Bool(_) => {
                        self.reader.check_templates(spot, scope);
                    }
                    _ => {
                        let name = shorten(name, ECHO);
                        let says =
                            format!("attribute {name:?} must be a text, a number, true or false");
                        self.reader.wrong(spot, says);
                    }
                }
            }
        }
    }
}

/// Where something with a name is.
pub(super) fn place(spot: &Spot<'_>) -> Place {
    Place {
        pointer: spot.pointer.clone(),
        line: spot.key.line,
        column: spot.key.column,
    }
}

/// A field of what may be an object.
pub(super) fn field<'n>(spot: &Spot<'n>, name: &str) -> Option<Spot<'n>> {
    let Data::Object(entries) = &spot.node.data else {
        return None;
    };
    let fields = Fields {
        spot: spot.clone(),
        entries,
    };
    fields.get(name)
}

/// Whether a text has the form of RFC 3339: `2026-01-31T12:00:00Z`, with any offset and fraction.
fn looks_like_a_time(text: &str) -> bool {
    let form = b"0000-00-00T00:00:00";
    let bytes = text.as_bytes();
    let is_form = bytes.len() > form.len()
        && bytes.iter().zip(form).all(|(byte, form)| match form {
            b'0' => byte.is_ascii_digit(),
            b'T' => matches!(byte, b'T' | b't'),
            other => byte == other,
        });
    let Some(rest) = bytes.get(form.len()..).filter(|_| is_form) else {
        return false;
    };
    let rest = match rest.split_first() {
        Some((b'.', digits)) => {
            let end = digits.iter().position(|byte| !byte.is_ascii_digit());
            &digits[end.unwrap_or(digits.len())..]
        }
        _ => rest,
    };
    match rest {
        b"Z" | b"z" => true,
        [b'+' | b'-', h, i, b':', m, n] => [h, i, m, n].iter().all(|byte| byte.is_ascii_digit()),
        _ => false,
    }
}
