//! What each page shows around its content, and for whom it is made.

use super::{assets, format};
use crate::{
    config::{Dashboard, Settings},
    model::{Access, Role},
};

/// Who looks at which page, and what is possible there.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    /// The way from this page to `/ui/`: `./`, `../` and so on. Links are relative, so the pages
    /// work below any path of a proxy.
    pub(super) root: String,
    /// The page and its query, from `/ui/` on.
    pub(super) path: String,
    /// The address of this taskd, as the browser names it.
    pub(super) address: String,
    pub(super) who: String,
    /// Shows the buttons: the caller is an admin, and the dashboard is not read-only.
    pub(super) may_act: bool,
    pub(super) is_admin: bool,
    pub(super) is_known: bool,
    pub(super) has_login: bool,
    pub(super) sees_all: bool,
    pub(super) shows_payloads: bool,
}

impl Scene {
    pub(super) fn new(settings: &Settings, path_and_query: &str, host: &str, is_tls: bool) -> Self {
        let path = path_and_query.strip_prefix("/ui/").unwrap_or_default();
        let depth = path
            .split('?')
            .next()
            .unwrap_or_default()
            .matches('/')
            .count();
        let root = if depth == 0 {
            "./".to_owned()
        } else {
            "../".repeat(depth)
        };
        let scheme = if is_tls { "https" } else { "http" };
        Self {
            root,
            path: path.to_owned(),
            address: format!("{scheme}://{}", format::line(host)),
            who: String::new(),
            may_act: false,
            is_admin: false,
            is_known: false,
            has_login: settings.auth == crate::config::Auth::Tokens,
            sees_all: false,
            shows_payloads: settings.dashboard_payloads,
        }
    }

    /// Adds who calls.
    pub(super) fn seen_by(&mut self, access: &Access, settings: &Settings) {
        let is_admin = access
            .token()
            .is_none_or(|token| token.roles.include(Role::Admin));
        let role = if is_admin { "admin" } else { "read" };
        self.who = match access.token() {
            Some(token) => format!("{} ({role})", format::line(&token.name)),
            None => "no login".to_owned(),
        };
        self.is_admin = is_admin;
        self.is_known = true;
        self.may_act = is_admin && settings.dashboard == Dashboard::On;
        self.sees_all = access.reaches_everything();
    }
}

/// The head of a page.
pub(super) struct Head {
    pub(super) scene: Scene,
    pub(super) names: &'static assets::Names,
    pub(super) title: String,
    /// The entry of the navigation that is marked.
    pub(super) here: &'static str,
    /// The call of the API that answers the same, such as `v1/queues`; empty if there is none.
    pub(super) call: String,
    pub(super) is_live: bool,
    /// What was done just before.
    pub(super) did: &'static str,
}

impl Head {
    pub(super) fn new(scene: &Scene, here: &'static str, title: impl Into<String>) -> Self {
        Self {
            scene: scene.clone(),
            names: &assets::NAMES,
            title: title.into(),
            here,
            call: String::new(),
            is_live: false,
            did: "",
        }
    }

    pub(super) fn live(self) -> Self {
        Self {
            is_live: true,
            ..self
        }
    }

    pub(super) fn call(self, call: impl Into<String>) -> Self {
        Self {
            call: call.into(),
            ..self
        }
    }

    pub(super) fn did(self, did: &'static str) -> Self {
        Self { did, ..self }
    }

    /// The entries of the navigation: the link, the name, whether it is of this page.
    pub(super) fn entries(&self) -> Vec<(&'static str, &'static str, bool)> {
        let mut entries = vec![
            ("", "Overview"),
            ("tasks", "Tasks"),
            ("trees", "Trees"),
            ("dead", "Dead letters"),
            ("workers", "Workers"),
        ];
        if self.scene.sees_all {
            entries.push(("processes", "Processes"));
        }
        entries.push(("books", "Books"));
        entries.push(("bulk", "Bulk changes"));
        if self.scene.sees_all && self.scene.is_admin {
            entries.push(("acts", "Acts"));
        }
        let with_mark =
            |(path, name): (&'static str, &'static str)| (path, name, path == self.here);
        entries.into_iter().map(with_mark).collect()
    }

    pub(super) fn root(&self) -> &str {
        &self.scene.root
    }
}
