//! Imports point one way: each module may use those of the layers below its own, and only the named ones beside it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// From low to high.
const LAYERS: &[&[&str]] = &[
    &["config", "model", "runtime", "telemetry", "wire"],
    &["bus", "coordination", "dedup", "embedded", "queue", "redis_pool", "store"],
    &["admission"],
    &["publishing"],
    &["discovery", "fanout", "tasks", "watchdog"],
    &["api"],
    &["ingress"],
    &["app"],
    &["cli"],
];

/// Who may use whom within a layer. Boundaries do not know each other, nor do pipelines.
const BESIDE: &[(&str, &str)] = &[
    ("config", "model"),
    ("runtime", "model"),
    ("runtime", "telemetry"),
    ("telemetry", "config"),
    ("wire", "model"),
    ("bus", "redis_pool"),
    ("coordination", "redis_pool"),
    ("dedup", "redis_pool"),
    ("queue", "redis_pool"),
];

/// The folder whose modules have layers of their own.
const GROUP: &str = "pipelines";

/// How the names of backends begin; only they themselves and `app` say them.
const BACKENDS: &[&str] = &["SqliteStore", "MysqlStore", "MySqlStore", "Kafka", "RedisStreams"];
const MAY_NAME_BACKENDS: &[&str] = &["app", "bus", "store"];

#[test]
fn imports_point_from_the_high_layers_to_the_low() {
    let wrong: Vec<String> = sources().iter().flat_map(Source::wrong_arrows).collect();
    assert!(wrong.is_empty(), "these imports point back:\n{}", wrong.join("\n"));
}

#[test]
fn only_the_composition_root_names_backends() {
    let wrong: Vec<String> = sources().iter().flat_map(Source::backends_named).collect();
    assert!(wrong.is_empty(), "only src/app chooses a backend:\n{}", wrong.join("\n"));
}

#[test]
fn every_module_has_its_layer() {
    let read = |path: &str| tokens(&fs::read_to_string(src().join(path)).expect(path));
    let lists = [read("lib.rs"), read("pipelines/mod.rs")].concat();
    let modules = lists.windows(2).filter(|pair| pair[0] == "mod").map(|pair| pair[1].as_str());
    let modules: BTreeSet<_> = modules.filter(|module| *module != GROUP).collect();
    let layered: BTreeSet<_> = LAYERS.iter().flat_map(|layer| layer.iter().copied()).collect();
    assert_eq!(modules, layered, "the modules of src/lib.rs and the layers of this test");
}

#[test]
fn the_rules_let_through_what_is_meant_and_nothing_else() {
    for (from, to) in [("fanout", "bus"), ("app", "store"), ("wire", "model"), ("queue", "redis_pool"), ("cli", "app")]
    {
        assert!(allowed(from, to), "{from} -> {to}");
    }
    for (from, to) in [
        ("bus", "store"),
        ("model", "wire"),
        ("store", "fanout"),
        ("store", "redis_pool"),
        ("fanout", "tasks"),
        ("app", "cli"),
    ] {
        assert!(!allowed(from, to), "{from} -> {to}");
    }
}

#[test]
fn imports_are_found_in_every_form_and_not_in_comments_or_strings() {
    let text = r##"
        // use crate::comment;  /* use crate::comment */
        /* use crate::outer; /* use crate::inner; */ use crate::after; */
        /// [`crate::doc`]
        use crate::plain;
        use crate::{first, second::{deep, er}, third as other, r#fourth::{self}};
        use crate::pipelines::one::Thing;
        use crate::{before, pipelines::{two, three::Deep}, behind};
        pub(crate) use crate :: spaced::Thing;
        fn f<'a>(x: &'a crate::in_a_type::T) -> char { crate::called::g("crate::string", r#"crate::"raw"#, b'"'); '"' }
        const C: char = '\''; use crate::after_quotes::X;
    "##;
    let found: Vec<String> = modules_used(&tokens(text)).collect();
    let expected = [
        "plain",
        "first",
        "second",
        "third",
        "fourth",
        "one",
        "before",
        "behind",
        "two",
        "three",
        "spaced",
        "in_a_type",
        "called",
        "after_quotes",
    ];
    assert_eq!(found, expected);
}

/// A file of `src/`, as words and signs.
struct Source {
    path: PathBuf,
    /// The top module it belongs to; `None` for lib.rs and main.rs, which stand above all.
    module: Option<String>,
    tokens: Vec<String>,
}

impl Source {
    fn read(path: PathBuf) -> Self {
        let text = fs::read_to_string(&path).expect("a source file");
        let inner = path.strip_prefix(src()).expect("a path below src").with_extension("");
        let mut names = inner.iter().map(|name| name.to_string_lossy().into_owned());
        let top = names.find(|name| name != GROUP).expect("a name");
        let module = (!["lib", "main", "mod"].contains(&top.as_str())).then_some(top);
        Self { path, module, tokens: tokens(&text) }
    }

    fn wrong_arrows(&self) -> Vec<String> {
        let Some(module) = &self.module else { return Vec::new() };
        let wrong = modules_used(&self.tokens).filter(|used| used != module && !allowed(module, used));
        wrong.map(|used| format!("  {}: {module} -> {used}", self.path.display())).collect()
    }

    fn backends_named(&self) -> Vec<String> {
        if self.module.as_deref().is_some_and(|module| MAY_NAME_BACKENDS.contains(&module)) {
            return Vec::new();
        }
        let named = self.tokens.iter().filter(|token| BACKENDS.iter().any(|backend| token.starts_with(backend)));
        named.map(|token| format!("  {}: {token}", self.path.display())).collect()
    }
}

fn allowed(from: &str, to: &str) -> bool {
    match (layer(from), layer(to)) {
        (Some(from_layer), Some(to_layer)) => to_layer < from_layer || BESIDE.contains(&(from, to)),
        // `every_module_has_its_layer` speaks of modules that have none; what is no module is an item of lib.rs.
        _ => true,
    }
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn sources() -> Vec<Source> {
    let (mut folders, mut sources) = (vec![src()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sources.push(Source::read(path));
            }
        }
    }
    assert!(sources.len() > 20, "src/ was not read: {} files", sources.len());
    sources
}

/// The first name after each `crate::`, or the first names in its braces.
fn modules_used(tokens: &[String]) -> impl Iterator<Item = String> {
    let starts = (0..tokens.len()).filter(|&at| tokens[at..].starts_with(&["crate".into(), ":".into(), ":".into()]));
    starts.flat_map(|at| modules_at(&tokens[at + 3..]))
}

/// What a path or a tree of paths begins with; within the group what follows its name.
fn modules_at(tree: &[String]) -> Vec<String> {
    let mut names = first_names(tree);
    if let Some(at) = names.iter().position(|name| name == GROUP) {
        names.remove(at);
        let group = tree.iter().position(|token| token == GROUP).expect("its name");
        names.extend(first_names(&tree[group + 3..]));
    }
    names
}

fn first_names(tree: &[String]) -> Vec<String> {
    if tree.first().is_none_or(|token| token != "{") {
        return tree.first().cloned().into_iter().collect();
    }
    let (mut names, mut depth, mut expected) = (Vec::new(), 0, false);
    for token in tree {
        match token.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        match token.as_str() {
            _ if depth == 0 => break,
            "{" | "," if depth == 1 => expected = true,
            name if depth == 1 && expected => {
                names.push(name.to_owned());
                expected = false;
            }
            _ => {}
        }
    }
    names
}

/// Words and single signs, without comments and without what is quoted.
fn tokens(text: &str) -> Vec<String> {
    let (mut rest, mut tokens) = (text, Vec::new());
    while let Some(first) = rest.chars().next() {
        let length = not_code(rest).unwrap_or_else(|| {
            let word = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
            let length = if word > 0 { word } else { first.len_utf8() };
            if !first.is_whitespace() {
                tokens.push(rest[..length].to_owned());
            }
            length
        });
        rest = &rest[length..];
    }
    tokens
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The length of the comment, string or character that stands here (and of the mark of a raw name).
fn not_code(text: &str) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    if text.starts_with("/*") {
        return Some(block_comment(text));
    }
    let prefix = ["br", "cr", "b", "c", "r", ""].into_iter().find(|prefix| {
        let quoted = text.strip_prefix(prefix);
        quoted.is_some_and(|quoted| quoted.starts_with(['"', '\'']) || prefix.ends_with('r') && quoted.starts_with('#'))
    })?;
    let quoted = &text[prefix.len()..];
    let length = match quoted.as_bytes()[0] {
        b'\'' if prefix.is_empty() || prefix == "b" => character(quoted)?,
        b'\'' => return None,
        _ if prefix.ends_with('r') => raw_string(quoted),
        _ => closing(quoted, '"'),
    };
    Some(prefix.len() + length)
}

fn block_comment(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < text.len() {
        let pair = &text.as_bytes()[at..text.len().min(at + 2)];
        match pair {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            break;
        }
    }
    at
}

/// `'a'` or `'\n'`, but not the lifetime `'a`.
fn character(text: &str) -> Option<usize> {
    let mut inside = text[1..].chars();
    let first = inside.next()?;
    if first == '\\' {
        return Some(closing(text, '\''));
    }
    (inside.next() == Some('\'')).then_some(first.len_utf8() + 2)
}

/// `#"…"#`; for the raw name `r#fourth` only its `#`.
fn raw_string(text: &str) -> usize {
    let hashes = text.bytes().take_while(|byte| *byte == b'#').count();
    let Some(body) = text[hashes..].strip_prefix('"') else { return hashes };
    let end = format!("\"{}", "#".repeat(hashes));
    body.find(&end).map_or(text.len(), |at| hashes + 1 + at + end.len())
}

/// Up to the quote that closes the one at the start.
fn closing(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}
