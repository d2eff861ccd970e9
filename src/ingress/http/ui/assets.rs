//! The files of the pages, served from the binary. Each name has a hash of the content, so browsers
//! may keep them.

use std::sync::LazyLock;

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use sha2::{Digest, Sha256};

use super::super::{problem::Problem, request::Id};

const STYLE: &[u8] = include_bytes!("assets/style.css");
const SCRIPT: &[u8] = include_bytes!("assets/live.js");
const EVENTS: &[u8] = include_bytes!("assets/events.js");
/// See assets/README.md.
const MORPH: &[u8] = include_bytes!("assets/idiomorph.min.js");
const ICON: &[u8] = include_bytes!("assets/icon.svg");

/// The names under which the files are served.
pub(super) struct Names {
    pub(super) style: String,
    pub(super) script: String,
    pub(super) events: String,
    pub(super) morph: String,
    pub(super) icon: String,
}

pub(super) static NAMES: LazyLock<Names> = LazyLock::new(|| Names {
    style: name("style", STYLE, "css"),
    script: name("live", SCRIPT, "js"),
    events: name("events", EVENTS, "js"),
    morph: name("idiomorph", MORPH, "js"),
    icon: name("icon", ICON, "svg"),
});

fn name(stem: &str, content: &[u8], extension: &str) -> String {
    let hash = Sha256::digest(content);
    let [a, b, c, d, ..] = hash.as_slice() else {
        unreachable!("a hash has 32 bytes");
    };
    format!("{stem}-{a:02x}{b:02x}{c:02x}{d:02x}.{extension}")
}

pub(super) async fn get(Id(asked): Id) -> Response {
    let names = &*NAMES;
    let (content, kind) = match &asked {
        name if *name == names.style => (STYLE, "text/css; charset=utf-8"),
        name if *name == names.script => (SCRIPT, "text/javascript; charset=utf-8"),
        name if *name == names.events => (EVENTS, "text/javascript; charset=utf-8"),
        name if *name == names.morph => (MORPH, "text/javascript; charset=utf-8"),
        name if *name == names.icon => (ICON, "image/svg+xml"),
        _ => {
            return Problem::new(StatusCode::NOT_FOUND, "there is no such file").into_response();
        }
    };
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "public, max-age=31536000, immutable"),
    ];
    (headers, content).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_foreign_script_is_the_published_one() {
        let hash = Sha256::digest(MORPH);
        let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        let readme = include_str!("assets/README.md");
        assert!(
            readme.contains(&hex),
            "assets/README.md does not name {hex}"
        );
    }

    /// The policy of the pages forbids inline scripts and styles, and strangers' texts must be
    /// escaped.
    #[test]
    fn no_template_or_script_of_ours_can_run_foreign_text() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/ingress/http/ui/templates");
        let mut read = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let text = text.to_ascii_lowercase();
            for forbidden in [
                "style=",
                " on",
                "|safe",
                "| safe",
                "<style",
                "javascript:",
                "<base",
            ] {
                let found = text.match_indices(forbidden).any(|(at, _)| {
                    // ` on` begins an attribute only if `=` follows its name.
                    forbidden != " on"
                        || text[at + 1..]
                            .find(|c: char| !c.is_ascii_alphabetic())
                            .is_some_and(|end| text[at + 1 + end..].starts_with('='))
                });
                assert!(!found, "{} has {forbidden:?}", path.display());
            }
            for (at, _) in text.match_indices("<script") {
                let tag = &text[at..];
                let end = tag.find('>').unwrap();
                assert!(tag[..end].contains("src="), "{}", path.display());
                assert!(tag[end..].starts_with("></script>"), "{}", path.display());
            }
            read += 1;
        }
        assert!(read > 10, "{read} templates");
        for script in [SCRIPT, EVENTS] {
            let script = std::str::from_utf8(script).unwrap();
            for forbidden in [
                ".innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "eval",
                "document.write",
            ] {
                assert!(!script.contains(forbidden), "a script has {forbidden}");
            }
            assert!(script.lines().count() <= 150);
        }
        assert!(STYLE.len() <= 16 << 10, "{} bytes", STYLE.len());
    }
}
