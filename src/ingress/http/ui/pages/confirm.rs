//! The page that asks before many things are changed.

use askama::Template;

use crate::ingress::http::ui::{scene::Head, visit::page};

#[derive(Template)]
#[template(path = "confirm.html", blocks = ["frame"])]
pub(super) struct Confirm {
    pub(super) head: Head,
    pub(super) asks: String,
    pub(super) filter: Vec<(String, String)>,
    /// The reasons of the letters among them, and how many have each.
    pub(super) reasons: Vec<(String, String)>,
    /// Some of what is changed: the text, and a link from `/ui/` on or nothing.
    pub(super) samples: Vec<(String, String)>,
    /// Where the form goes, from `/ui/` on.
    pub(super) action: String,
    pub(super) hidden: Vec<(String, String)>,
    /// What must be typed, or nothing.
    pub(super) typed: String,
    /// The button; empty if nothing can be done.
    pub(super) verb: String,
    pub(super) kind: &'static str,
    pub(super) back: String,
}
page!(Confirm);
