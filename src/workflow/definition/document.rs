//! Reads what stands around the tasks: the document itself, and what tasks refer to by name.

use std::collections::BTreeMap;

use super::{
    Definition, Document, Mistake, ReadDefinition, Use, expressions, functions,
    node::{At, not_yet},
    parts::Names,
    reader::{Check, Fields, Reader, Scope, Spot},
    tasks::Tasks,
    yaml,
};
use crate::model::{ECHO, shorten};

/// The versions of the language.
const VERSIONS: [&str; 4] = ["1.0.0", "1.0.1", "1.0.2", "1.0.3"];
/// The longest version of a definition.
const LONGEST_VERSION: usize = 64;

const FIELDS: [&str; 7] = [
    "document", "input", "use", "do", "timeout", "output", "evaluate",
];
const DOCUMENT_FIELDS: [&str; 8] = [
    "dsl",
    "namespace",
    "name",
    "version",
    "title",
    "summary",
    "tags",
    "metadata",
];

impl Definition {
    /// Reads a text in YAML 1.2 or JSON. Returns all mistakes, in the order of the text.
    pub fn read(text: &str) -> Result<ReadDefinition, Vec<Mistake>> {
        read(text, expressions::check)
    }
}

pub(super) fn read(text: &str, check: Check) -> Result<ReadDefinition, Vec<Mistake>> {
    let (root, mistakes) = yaml::read(text);
    let mut reader = Reader::new(mistakes, check);
    let Some(root) = root else {
        return Err(reader.into_mistakes());
    };
    let spot = Spot {
        node: &root,
        key: At { line: 1, column: 1 },
        pointer: String::new(),
    };
    let definition = reader.definition(&spot);
    match definition {
        Some(definition) if !reader.has_mistakes() => Ok(ReadDefinition {
            definition,
            json: root.to_value(),
        }),
        _ => Err(reader.into_mistakes()),
    }
}

impl Reader {
    fn definition(&mut self, root: &Spot<'_>) -> Option<Definition> {
        let fields = self.object("a definition", root)?;
        for (name, spot) in fields.all() {
            match name {
                "schedule" => self.not_yet(
                    &spot,
                    "schedules",
                    "start executions yourself, for example from cron",
                ),
                "metadata" => self.wrong_name(&spot, "metadata belongs into document"),
                name if !FIELDS.contains(&name) => self.unknown(&spot, name, &FIELDS),
                _ => {}
            }
        }
        let document = match fields.get("document") {
            Some(spot) => self.document(&spot),
            None => {
                let example = "document: { dsl: '1.0.3', namespace: …, name: …, version: … }";
                self.missing(&fields, "document", example);
                None
            }
        };
        if let Some(spot) = fields.get("evaluate") {
            self.evaluate(&spot);
        }
        let scope = Scope::new();
        let use_ = fields.get("use").and_then(|spot| self.object("use", &spot));
        let names = match &use_ {
            Some(use_) => self.names(use_),
            None => Names::default(),
        };
        let input = fields
            .get("input")
            .and_then(|spot| self.input(&spot, &scope));
        let timeout = fields
            .get("timeout")
            .and_then(|spot| self.timeout(&spot, &names, &scope));
        let do_ = match fields.get("do") {
            Some(spot) => Tasks::new(self, &names).list("do", &spot, &scope),
            None => {
                self.missing(&fields, "do", "the list of the tasks");
                None
            }
        };
        let output = fields
            .get("output")
            .and_then(|spot| self.output(&spot, &scope));
        // After the tasks, which check the retries that they use.
        let use_ = use_.map(|fields| self.use_(&fields, &names));
        let definition = Definition {
            document: document.clone().unwrap_or_default(),
            input,
            use_: use_.unwrap_or_default(),
            do_: do_?,
            timeout,
            output,
        };
        for (place, says) in functions::check(&definition) {
            self.wrong_at(&place, says);
        }
        document.map(|_| definition)
    }

    fn document(&mut self, spot: &Spot<'_>) -> Option<Document> {
        let fields = self.object("document", spot)?;
        self.only(&fields, &DOCUMENT_FIELDS);
        let mut required = |name: &str, example: &str| match fields.get(name) {
            Some(spot) => self.text(name, &spot).map(|text| (spot, text.to_owned())),
            None => {
                self.missing(&fields, name, example);
                None
            }
        };
        let dsl = required("dsl", "the version of the language, '1.0.3'");
        let namespace = required("namespace", "namespace: default");
        let name = required("name", "name: my-workflow");
        let version = required("version", "version: '1.0.0'");
        if let Some((spot, dsl)) = &dsl
            && !VERSIONS.contains(&dsl.as_str())
        {
            let dsl = shorten(dsl, ECHO);
            let says = format!("dsl is {dsl:?}; expected {}", VERSIONS.join(", "));
            self.wrong(spot, says);
        }
        for (what, found) in [("namespace", &namespace), ("name", &name)] {
            if let Some((spot, text)) = found
                && !is_label(text)
            {
                let text = shorten(text, ECHO);
                let says = format!(
                    "{what} {text:?}: it has 1 to 63 characters of A-Z a-z 0-9 -, and no - at its ends"
                );
                self.wrong(spot, says);
            }
        }
        if let Some((spot, text)) = &version
            && (text.len() > LONGEST_VERSION || !is_semantic_version(text))
        {
            let text = shorten(text, ECHO);
            let says = format!(
                "version {text:?} is no semantic version of at most {LONGEST_VERSION} characters, such as '1.0.0'"
            );
            self.wrong(spot, says);
        }
        let title = fields
            .get("title")
            .and_then(|spot| self.owned("title", &spot));
        let summary = fields
            .get("summary")
            .and_then(|spot| self.owned("summary", &spot));
        let tags = fields.get("tags").and_then(|spot| self.map("tags", &spot));
        let metadata = fields
            .get("metadata")
            .and_then(|spot| self.object("metadata", &spot));
        if let Some(spot) = metadata.as_ref().and_then(|metadata| metadata.get("taskd")) {
            self.wrong_name(&spot, "metadata.taskd belongs to tasks that call something");
        }
        let metadata = metadata.and_then(|metadata| self.map("metadata", &metadata.spot));
        let text = |found: Option<(Spot<'_>, String)>| found.map(|(_, text)| text);
        Some(Document {
            dsl: text(dsl)?,
            namespace: text(namespace)?,
            name: text(name)?,
            version: text(version)?,
            title,
            summary,
            tags: tags.unwrap_or_default(),
            metadata: metadata.unwrap_or_default(),
        })
    }

    fn evaluate(&mut self, spot: &Spot<'_>) {
        let Some(fields) = self.object("evaluate", spot) else {
            return;
        };
        self.only(&fields, &["language", "mode"]);
        if let Some(spot) = fields.get("language")
            && let Some(language) = self.text("evaluate.language", &spot)
            && language != "jq"
        {
            let language = shorten(language, ECHO);
            let says = format!("evaluate.language is {language:?}; expected jq");
            self.wrong(&spot, says);
        }
        let modes = [("strict", true), ("loose", false)];
        if let Some(spot) = fields.get("mode")
            && self.one_of("evaluate.mode", &spot, &modes) == Some(false)
        {
            let says = not_yet("evaluate.mode loose", "wrap expressions: ${ … }");
            self.wrong(&spot, says);
        }
    }

    /// Reads all that `use` has, whether or not a task refers to it.
    fn use_<'n>(&mut self, fields: &Fields<'n>, names: &Names<'n>) -> Use {
        let scope = Scope::new();
        let mut read = Use {
            secrets: names
                .secrets
                .iter()
                .map(|name| (*name).to_owned())
                .collect(),
            ..Use::default()
        };
        read.timeouts = self.group(&names.timeouts, |reader, spot| {
            reader.own_timeout(spot, &scope)
        });
        read.errors = self.group(&names.errors, |reader, spot| reader.own_error(spot, &scope));
        read.authentications = self.group(&names.authentications, |reader, spot| {
            reader.own_authentication(spot, names, &scope)
        });
        let functions = fields
            .get("functions")
            .and_then(|spot| match spot.is_object() {
                true => self.object("use.functions", &spot),
                // That is a mistake already.
                false => None,
            });
        for (name, spot) in functions.iter().flat_map(Fields::all) {
            if let Some(task) = Tasks::new(self, names).function(name, &spot) {
                read.functions.insert(name.to_owned(), task);
            }
        }
        let of_error = vec!["error".to_owned()];
        for (name, spot) in names.retries.iter().flat_map(Fields::all) {
            // Its variables depend on where it is used, and there it has been checked.
            let before = self.used_retries.contains(name).then(|| self.count());
            if let Some(policy) = self.own_retry(&spot, &of_error) {
                read.retries.insert(name.to_owned(), policy);
            }
            if let Some(before) = before {
                self.forget_after(before);
            }
        }
        read
    }

    fn group<'n, T>(
        &mut self,
        fields: &Option<Fields<'n>>,
        mut read: impl FnMut(&mut Self, &Spot<'n>) -> Option<T>,
    ) -> BTreeMap<String, T> {
        let all = fields.iter().flat_map(Fields::all);
        all.filter_map(|(name, spot)| Some((name.to_owned(), read(self, &spot)?)))
            .collect()
    }
}

/// A label of DNS.
fn is_label(text: &str) -> bool {
    let is_inner = |c: char| c.is_ascii_alphanumeric() || c == '-';
    (1..=63).contains(&text.len())
        && text.chars().all(is_inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn is_semantic_version(text: &str) -> bool {
    let is_identifier = |text: &str| {
        !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    let is_number = |text: &str| {
        !text.is_empty()
            && text.bytes().all(|byte| byte.is_ascii_digit())
            && (text == "0" || !text.starts_with('0'))
    };
    let (text, build) = match text.split_once('+') {
        Some((text, build)) => (text, Some(build)),
        None => (text, None),
    };
    let (core, pre) = match text.split_once('-') {
        Some((core, pre)) => (core, Some(pre)),
        None => (text, None),
    };
    let numbers: Vec<&str> = core.split('.').collect();
    let is_pre = |part: &str| {
        let is_digits = part.bytes().all(|byte| byte.is_ascii_digit());
        is_identifier(part) && (!is_digits || is_number(part))
    };
    numbers.len() == 3
        && numbers.into_iter().all(is_number)
        && pre.is_none_or(|pre| pre.split('.').all(is_pre))
        && build.is_none_or(|build| build.split('.').all(is_identifier))
}
