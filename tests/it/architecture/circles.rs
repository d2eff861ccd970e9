//! Circles between files: the arrows of one file to another, and the files that reach themselves by
//! them.
//!
//! An arrow leads from a file to the file that *defines* what it uses: a name that a `mod.rs` only
//! re-exports leads to the child behind it. Declarations (`mod x;`) are no arrows, nor are
//! re-exports (`pub use`) of names that the file does not use itself. So a `mod.rs` may be the
//! front of its folder. Tests (`#[cfg(test)]`) may use everything.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
};

use super::tokens::tokens;

/// A path through modules, from the root of its crate.
type Names = Vec<String>;

/// A file as a module.
#[derive(Default)]
struct Module {
    path: PathBuf,
    name: Names,
    /// The files that it declares with `mod x;`.
    children: BTreeSet<String>,
    /// The names that `use` brings into it.
    bound: BTreeMap<String, Names>,
    /// The paths and names that it uses.
    used: Vec<Names>,
}

/// The modules of a crate, by name.
pub(super) struct Crate(BTreeMap<Names, Module>);

impl Crate {
    /// Reads `root` (`lib.rs` or `main.rs`) and the modules below it.
    pub(super) fn read(root: &Path) -> Self {
        let mut modules = BTreeMap::new();
        let mut left = vec![(root.to_owned(), Names::new())];
        while let Some((path, name)) = left.pop() {
            let text = fs::read_to_string(&path)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let module = Module::read(&path, name, &tokens(&text));
            let is_front = ["lib.rs", "main.rs", "mod.rs"]
                .iter()
                .any(|front| path.ends_with(front));
            let folder = if is_front {
                path.parent().expect("a folder").to_owned()
            } else {
                path.with_extension("")
            };
            for child in &module.children {
                let file = folder.join(format!("{child}.rs"));
                let file = if file.exists() {
                    file
                } else {
                    folder.join(child).join("mod.rs")
                };
                left.push((file, join(&module.name, child)));
            }
            modules.insert(module.name.clone(), module);
        }
        Self(modules)
    }

    /// The circles, each with the arrows between its files.
    pub(super) fn circles(&self) -> Vec<Circle> {
        let arrows = self.arrows();
        let reached: BTreeMap<_, _> = arrows
            .keys()
            .map(|from| (*from, reach(from, &arrows)))
            .collect();
        let mut circles = BTreeSet::new();
        for (from, to) in &reached {
            let members: BTreeSet<_> = to
                .iter()
                .filter(|to| reached[**to].contains(*from))
                .copied()
                .collect();
            if !members.is_empty() {
                circles.insert(members);
            }
        }
        let circle = |members: BTreeSet<&Names>| {
            let between = |from: &&Names| {
                arrows[*from]
                    .intersection(&members)
                    .map(|to| (self.file(from), self.file(to)))
                    .collect::<Vec<_>>()
            };
            Circle(members.iter().flat_map(between).collect())
        };
        circles.into_iter().map(circle).collect()
    }

    fn file(&self, name: &Names) -> PathBuf {
        let path = &self.0[name].path;
        path.strip_prefix(env!("CARGO_MANIFEST_DIR"))
            .unwrap_or(path)
            .to_owned()
    }

    fn arrows(&self) -> BTreeMap<&Names, BTreeSet<&Names>> {
        let arrows = self.0.values().map(|module| {
            let to = module
                .used
                .iter()
                .filter_map(|path| self.defines(path, 0))
                .filter(|to| **to != module.name);
            (&module.name, to.collect())
        });
        arrows.collect()
    }

    /// The module that defines what stands at a path; `None` for a module itself and for names from
    /// elsewhere.
    fn defines(&self, path: &[String], depth: usize) -> Option<&Names> {
        let mut module = self.0.get(&Names::new())?;
        for (at, name) in path.iter().enumerate() {
            if module.children.contains(name) {
                module = self.0.get(&join(&module.name, name))?;
                continue;
            }
            return match module.bound.get(name) {
                Some(_) if depth == 8 => None,
                Some(bound) => self.defines(&[&bound[..], &path[at + 1..]].concat(), depth + 1),
                None => Some(&module.name),
            };
        }
        None
    }
}

/// The arrows of a circle, from file to file.
pub(super) struct Circle(pub(super) Vec<(PathBuf, PathBuf)>);

impl Circle {
    /// The folder that holds all its files.
    pub(super) fn folder(&self) -> PathBuf {
        let mut folder = self.0[0].0.clone();
        while !self.0.iter().all(|(from, _)| from.starts_with(&folder)) {
            folder.pop();
        }
        folder
    }
}

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "a circle in {}:", self.folder().display())?;
        self.0
            .iter()
            .try_for_each(|(from, to)| writeln!(f, "  {} -> {}", from.display(), to.display()))
    }
}

fn reach<'a>(
    from: &'a Names,
    arrows: &BTreeMap<&'a Names, BTreeSet<&'a Names>>,
) -> BTreeSet<&'a Names> {
    let (mut reached, mut left) = (BTreeSet::new(), vec![from]);
    while let Some(at) = left.pop() {
        left.extend(arrows[at].iter().filter(|to| reached.insert(**to)));
    }
    reached
}

fn join(name: &[String], child: &str) -> Names {
    name.iter().cloned().chain([child.to_owned()]).collect()
}

const CFG_TEST: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];

impl Module {
    fn read(path: &Path, name: Names, tokens: &[String]) -> Self {
        let mut module = Self {
            path: path.to_owned(),
            name: name.clone(),
            ..Self::default()
        };
        // The inline modules around a token, each with its depth of braces.
        let (mut inside, mut depth): (Vec<(String, usize)>, usize) = (Vec::new(), 0);
        let (mut names, mut re_exported) = (Vec::new(), BTreeSet::new());
        let mut at = 0;
        while at < tokens.len() {
            let here: Names = name
                .iter()
                .cloned()
                .chain(inside.iter().map(|(name, _)| name.clone()))
                .collect();
            match (
                tokens[at].as_str(),
                tokens.get(at + 1),
                tokens.get(at + 2).map(String::as_str),
            ) {
                ("#", ..) if tokens[at..].iter().take(7).eq(&CFG_TEST) => {
                    at += 6 + item(&tokens[at + 7..])
                }
                ("mod", Some(child), Some(";")) => {
                    module.children.insert(child.clone());
                }
                ("mod", Some(child), Some("{")) => inside.push((child.clone(), depth)),
                // Not `impl Trait + use<'a>`.
                ("use", Some(next), _) if next != "<" => {
                    let end = at
                        + tokens[at..]
                            .iter()
                            .position(|token| token == ";")
                            .expect("the end of `use`");
                    let is_public = at > 0 && ["pub", ")"].contains(&tokens[at - 1].as_str());
                    for (path, bound) in tree(&tokens[at + 1..end]) {
                        let Some(path) = module.absolute(&path, &here) else {
                            continue;
                        };
                        if is_public {
                            re_exported.insert(bound.clone());
                        } else {
                            module.used.push(path.clone());
                        }
                        module.bound.insert(bound, path);
                    }
                    at = end;
                }
                ("{", ..) => depth += 1,
                ("}", ..) => {
                    depth -= 1;
                    inside.pop_if(|(_, outside)| *outside == depth);
                }
                _ if is_start(tokens, at) => {
                    let path = path_at(&tokens[at..]);
                    at += 3 * (path.len() - 1);
                    names.push((path, here));
                }
                _ => {}
            }
            at += 1;
        }
        for (path, here) in names {
            let is_path =
                path.len() > 1 && (is_relative(&path[0]) || module.children.contains(&path[0]));
            if is_path
                || module.bound.contains_key(&path[0])
                    && (path.len() > 1 || re_exported.contains(&path[0]))
            {
                module.used.extend(module.absolute(&path, &here));
            }
        }
        module
    }

    /// A path from the root of the crate; `here` is the module that has it. `None` for names of
    /// other crates.
    fn absolute(&self, path: &[String], here: &[String]) -> Option<Names> {
        let up = path.iter().take_while(|name| *name == "super").count();
        let absolute = match path.first().map(String::as_str) {
            Some("crate") => path[1..].to_vec(),
            Some("self") => [here, &path[1..]].concat(),
            Some("super") => [&here[..here.len().saturating_sub(up)], &path[up..]].concat(),
            Some(first) if self.children.contains(first) => [&self.name[..], path].concat(),
            Some(first) if self.bound.contains_key(first) => {
                [&self.bound[first][..], &path[1..]].concat()
            }
            _ => return None,
        };
        Some(absolute)
    }
}

/// The length of the item at the start of `tokens`: up to its `;` or its closing brace.
fn item(tokens: &[String]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "{" => depth += 1,
            "}" if depth == 1 => return at + 1,
            "}" => depth -= 1,
            ";" if depth == 0 => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}

fn is_relative(name: &str) -> bool {
    ["crate", "self", "super"].contains(&name)
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// True if a path or a name begins at this token: not what follows `::` or `.`.
fn is_start(tokens: &[String], at: usize) -> bool {
    is_word(&tokens[at])
        && (at == 0
            || ![":", "."].contains(&tokens[at - 1].as_str())
            || tokens[at - 1] == ":" && (at < 2 || tokens[at - 2] != ":"))
}

/// The names at the start of `tokens` that `::` joins.
fn path_at(tokens: &[String]) -> Names {
    let mut path = vec![tokens[0].clone()];
    let mut rest = &tokens[1..];
    while let [a, b, name, ..] = rest
        && a == ":"
        && b == ":"
        && is_word(name)
    {
        path.push(name.clone());
        rest = &rest[3..];
    }
    path
}

/// The paths of a `use`, each with the name that it binds.
fn tree(tokens: &[String]) -> Vec<(Names, String)> {
    let Some(first) = tokens.first() else {
        return Vec::new();
    };
    if first == ":" {
        return tree(&tokens[2..]);
    }
    if first == "{" {
        let inner = &tokens[1..tokens.len() - 1];
        let (mut depth, mut start, mut found) = (0, 0, Vec::new());
        for (at, token) in inner.iter().enumerate() {
            match token.as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                "," if depth == 0 => {
                    found.extend(tree(&inner[start..at]));
                    start = at + 1;
                }
                _ => {}
            }
        }
        found.extend(tree(&inner[start..]));
        return found;
    }
    match tokens.get(1).map(String::as_str) {
        Some(":") => {
            let below =
                tree(&tokens[3..])
                    .into_iter()
                    .map(|(path, bound)| match path[..].split_first() {
                        Some((only, [])) if only == "self" => (
                            vec![first.clone()],
                            if bound == "self" {
                                first.clone()
                            } else {
                                bound
                            },
                        ),
                        _ => ([std::slice::from_ref(first), &path[..]].concat(), bound),
                    });
            below.collect()
        }
        Some("as") => vec![(vec![first.clone()], tokens[2].clone())],
        _ => vec![(vec![first.clone()], first.clone())],
    }
}

#[test]
fn circles_are_found_through_fronts_and_fronts_are_in_none() {
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| fs::write(folder.path().join(path), text).unwrap();
    fs::create_dir(folder.path().join("a")).unwrap();
    write("lib.rs", "mod a; mod b;");
    write(
        "b.rs",
        "use crate::a::X; fn f() -> X { crate::a::y::g::<'a'>() }",
    );
    write(
        "a/mod.rs",
        "mod x; mod y; #[cfg(test)] mod tests { use crate::b; fn t() { b::f() } } pub use self::x::{X as Z, *};",
    );
    write(
        "a/x.rs",
        "use super::{y::{self, Y}}; pub struct X; #[cfg(test)] use super::Z;",
    );
    write("a/y.rs", "pub struct Y; pub fn g() {}");
    assert_eq!(
        Crate::read(&folder.path().join("lib.rs")).circles().len(),
        0
    );
    write("a/y.rs", "pub struct Y; pub fn g() -> super::Z {}");
    let circles: Vec<_> = Crate::read(&folder.path().join("lib.rs")).circles();
    assert_eq!(circles.len(), 1);
    let files: Vec<_> = circles[0]
        .0
        .iter()
        .map(|(from, _)| from.file_name().unwrap().to_owned())
        .collect();
    assert_eq!(files, ["x.rs", "y.rs"]);
}
