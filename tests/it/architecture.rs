//! Imports point one way: a module may use the layers below its own, and only the named modules
//! beside it. No files form a circle.
//!
//! `DRAW=1 cargo test --test it architecture::drawing -- --nocapture` prints the arrows for
//! ARCHITECTURE.md.

mod circles;
mod tokens;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
};

use self::{circles::Crate, tokens::tokens};

/// The layers, from low to high.
const LAYERS: &[&[&str]] = &[
    &[
        "config",
        "model",
        "runtime",
        "telemetry",
        "wire",
        "workflow",
    ],
    &[
        "bus",
        "coordination",
        "dedup",
        "embedded",
        "enrichment",
        "feeds",
        "outbound",
        "queue",
        "redis_pool",
        "store",
    ],
    &["admission", "checking"],
    &["changing", "publishing", "shortcut"],
    &["context"],
    &["discovery", "fanout", "memory", "tasks", "watchdog"],
    &["workflows"],
    &["api"],
    &["ingress"],
    &["app"],
    &["cli"],
];

/// The arrows within a layer. Boundaries do not know each other, nor do pipelines.
const BESIDE: &[(&str, &str)] = &[
    ("config", "model"),
    ("runtime", "model"),
    ("runtime", "telemetry"),
    ("telemetry", "config"),
    ("telemetry", "model"),
    ("wire", "model"),
    ("workflow", "model"),
    ("bus", "redis_pool"),
    ("coordination", "redis_pool"),
    ("dedup", "redis_pool"),
    ("enrichment", "outbound"),
    ("feeds", "redis_pool"),
    ("queue", "redis_pool"),
];

/// The folder whose modules have layers of their own.
const GROUP: &str = "pipelines";

/// The beginnings of the names of backends. Only the backends themselves and `app` say them.
const BACKENDS: &[&str] = &[
    "SqliteStore",
    "MysqlStore",
    "MySqlStore",
    "Kafka",
    "RedisStreams",
];
const MAY_NAME_BACKENDS: &[&str] = &["app", "bus", "store"];

#[test]
fn imports_point_from_the_high_layers_to_the_low() {
    let wrong: Vec<String> = sources().iter().flat_map(Source::wrong_arrows).collect();
    assert!(
        wrong.is_empty(),
        "these imports point back:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn only_the_composition_root_names_backends() {
    let wrong: Vec<String> = sources().iter().flat_map(Source::backends_named).collect();
    assert!(
        wrong.is_empty(),
        "only src/app chooses a backend:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn no_files_form_a_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = [
        "src/lib.rs",
        "benches/taskd/main.rs",
        "clients/rust/src/lib.rs",
    ]
    .map(|file| Crate::read(&root.join(file)));
    let circles: Vec<_> = crates
        .iter()
        .flat_map(Crate::circles)
        .map(|circle| circle.to_string())
        .collect();
    assert!(circles.is_empty(), "{}", circles.join("\n"));
}

#[test]
fn drawing() {
    let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources() {
        let Some(module) = source.module else {
            continue;
        };
        let used =
            modules_used(&source.tokens).filter(|used| *used != module && layer(used).is_some());
        let used: Vec<_> = used.collect();
        arrows.entry(module).or_default().extend(used);
    }
    assert!(arrows["app"].contains("api"));
    if env::var_os("DRAW").is_some() {
        for name in LAYERS.iter().rev().flat_map(|layer| layer.iter()) {
            let to: Vec<_> = arrows
                .get(*name)
                .into_iter()
                .flatten()
                .map(String::as_str)
                .collect();
            println!("{name} -> {}", to.join(", "));
        }
    }
}

#[test]
fn only_wire_grpc_and_the_client_know_protobuf() {
    // The messages of OpenTelemetry are not taskd's.
    let otlp = "telemetry/traces/transport.rs";
    let known: Vec<_> = ["wire", "ingress/grpc.rs", "ingress/grpc", "cli", otlp]
        .map(|path| src().join(path))
        .into();
    let may_name = |source: &Source| known.iter().any(|known| source.path.starts_with(known));
    let names = |source: &Source| {
        source
            .tokens
            .iter()
            .any(|token| matches!(&token[..], "pb" | "prost" | "prost_types"))
    };
    let wrong: Vec<_> = sources()
        .into_iter()
        .filter(|source| names(source) && !may_name(source))
        .collect();
    let wrong: Vec<_> = wrong
        .iter()
        .map(|source| source.path.display().to_string())
        .collect();
    assert!(
        wrong.is_empty(),
        "only src/wire converts protobuf:\n{}",
        wrong.join("\n")
    );
}

/// Processes compare times that others wrote, so a machine whose clock is wrong must not write any:
/// `runtime::Clock` has the time that all share.
#[test]
fn no_pipeline_and_no_way_in_reads_a_clock_of_its_own() {
    const CLOCKS: [[&str; 2]; 6] = [
        ["SystemTime", "now"],
        ["Utc", "now"],
        ["Local", "now"],
        ["Uuid", "now_v7"],
        ["TaskId", "new"],
        ["Act", "new"],
    ];
    let mut wrong = Vec::new();
    for folder in ["pipelines", "api", "ingress"] {
        for source in sources()
            .iter()
            .filter(|source| source.path.starts_with(src().join(folder)))
        {
            if source.path.ends_with("tests.rs") {
                continue;
            }
            let text = fs::read_to_string(&source.path).expect("a source");
            // The tests of a module are at its end.
            let text = text
                .split("#[cfg(test)]\nmod tests")
                .next()
                .unwrap_or_default();
            let tokens: Vec<String> = tokens(text)
                .into_iter()
                .filter(|token| token != ":")
                .collect();
            for three in tokens.windows(3) {
                let [before, name, after] = [0, 1, 2].map(|at| three[at].as_str());
                // The function of `model`, not the method of a clock.
                let is_model =
                    name == "now_unix_ms" && after == "(" && !matches!(before, "." | "fn");
                if is_model || CLOCKS.contains(&[before, name]) {
                    wrong.push(format!("{}: {before}::{name}", source.path.display()));
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "these read this machine's clock, and not runtime::Clock:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn every_module_has_its_layer() {
    let read = |path: &str| tokens(&fs::read_to_string(src().join(path)).expect(path));
    let lists = [read("lib.rs"), read("pipelines/mod.rs")].concat();
    let modules = lists
        .windows(2)
        .filter(|pair| pair[0] == "mod")
        .map(|pair| pair[1].as_str());
    let modules: BTreeSet<_> = modules.filter(|module| *module != GROUP).collect();
    let layered: BTreeSet<_> = LAYERS
        .iter()
        .flat_map(|layer| layer.iter().copied())
        .collect();
    assert_eq!(
        modules, layered,
        "the modules of src/lib.rs and the layers of this test"
    );
}

#[test]
fn the_rules_let_through_what_is_meant_and_nothing_else() {
    for (from, to) in [
        ("fanout", "bus"),
        ("app", "store"),
        ("wire", "model"),
        ("queue", "redis_pool"),
        ("cli", "app"),
    ] {
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
    /// The top module of the file; `None` for lib.rs and main.rs, which may use all.
    module: Option<String>,
    tokens: Vec<String>,
}

impl Source {
    fn read(path: PathBuf) -> Self {
        let text = fs::read_to_string(&path).expect("a source file");
        let inner = path
            .strip_prefix(src())
            .expect("a path below src")
            .with_extension("");
        let mut names = inner.iter().map(|name| name.to_string_lossy().into_owned());
        let top = names.find(|name| name != GROUP).expect("a name");
        let module = (!["lib", "main", "mod"].contains(&top.as_str())).then_some(top);
        Self {
            path,
            module,
            tokens: tokens(&text),
        }
    }

    fn wrong_arrows(&self) -> Vec<String> {
        let Some(module) = &self.module else {
            return Vec::new();
        };
        let wrong =
            modules_used(&self.tokens).filter(|used| used != module && !allowed(module, used));
        wrong
            .map(|used| format!("  {}: {module} -> {used}", self.path.display()))
            .collect()
    }

    fn backends_named(&self) -> Vec<String> {
        if self
            .module
            .as_deref()
            .is_some_and(|module| MAY_NAME_BACKENDS.contains(&module))
        {
            return Vec::new();
        }
        // The tests of a module are at its end. They may open one.
        let tests = self
            .tokens
            .windows(2)
            .position(|two| two == ["mod", "tests"]);
        let code = &self.tokens[..tests.unwrap_or(self.tokens.len())];
        let named = code
            .iter()
            .filter(|token| BACKENDS.iter().any(|backend| token.starts_with(backend)));
        named
            .map(|token| format!("  {}: {token}", self.path.display()))
            .collect()
    }
}

fn allowed(from: &str, to: &str) -> bool {
    match (layer(from), layer(to)) {
        (Some(from_layer), Some(to_layer)) => to_layer < from_layer || BESIDE.contains(&(from, to)),
        // `every_module_has_its_layer` names modules without a layer. Other names are items of
        // lib.rs.
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
    assert!(
        sources.len() > 20,
        "src/ was not read: {} files",
        sources.len()
    );
    sources
}

/// The first name after each `crate::`, or the first names in its braces.
fn modules_used(tokens: &[String]) -> impl Iterator<Item = String> {
    let starts = (0..tokens.len())
        .filter(|&at| tokens[at..].starts_with(&["crate".into(), ":".into(), ":".into()]));
    starts.flat_map(|at| modules_at(&tokens[at + 3..]))
}

/// The modules at the beginning of a path or a tree of paths; within the group, the names after the
/// group's.
fn modules_at(tree: &[String]) -> Vec<String> {
    let mut names = first_names(tree);
    if let Some(at) = names.iter().position(|name| name == GROUP) {
        names.remove(at);
        let group = tree
            .iter()
            .position(|token| token == GROUP)
            .expect("its name");
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
