//! Reads what tasks refer to by name, and what workflow and tasks have in common.

use std::collections::BTreeSet;

use super::{
    Authentication, ErrorDefinition, Export, Input, Output, Period, RetryBackoff, RetryPolicy,
    Schema, Timeout, expressions,
    reader::{Fields, Reader, Scope, Spot},
};
use crate::model::{ECHO, shorten};

const USE_FIELDS: [&str; 6] = [
    "authentications",
    "errors",
    "functions",
    "retries",
    "secrets",
    "timeouts",
];
const RETRY_FIELDS: [&str; 6] = ["when", "exceptWhen", "delay", "backoff", "limit", "jitter"];

/// What `use` has, as far as tasks refer to it.
#[derive(Clone, Default)]
pub(super) struct Names<'n> {
    pub(super) timeouts: Option<Fields<'n>>,
    pub(super) retries: Option<Fields<'n>>,
    pub(super) errors: Option<Fields<'n>>,
    pub(super) authentications: Option<Fields<'n>>,
    pub(super) secrets: Vec<&'n str>,
    pub(super) functions: BTreeSet<&'n str>,
}

impl Reader {
    /// Collects what tasks may refer to, without reading it.
    pub(super) fn names<'n>(&mut self, use_: &Fields<'n>) -> Names<'n> {
        for (name, spot) in use_.all() {
            match name {
                "extensions" => self.not_yet(
                    &spot,
                    "extensions",
                    "write the tasks where they are to happen",
                ),
                "catalogs" => self.not_yet(&spot, "catalogs", "write functions in use.functions"),
                name if !USE_FIELDS.contains(&name) => self.unknown(&spot, name, &USE_FIELDS),
                _ => {}
            }
        }
        let mut group = |name: &str| {
            let spot = use_.get(name)?;
            let fields = self.object(&format!("use.{name}"), &spot)?;
            for (name, spot) in fields.all() {
                self.check_name("name", &spot, name);
            }
            Some(fields)
        };
        let timeouts = group("timeouts");
        let retries = group("retries");
        let errors = group("errors");
        let authentications = group("authentications");
        let functions = group("functions");
        let mut secrets = Vec::new();
        let listed = use_
            .get("secrets")
            .and_then(|spot| self.list("use.secrets", &spot));
        for spot in listed.unwrap_or_default() {
            let Some(name) = self.text("a secret", &spot) else {
                continue;
            };
            self.check_name("secret", &spot, name);
            if secrets.contains(&name) {
                let name = shorten(name, ECHO);
                self.wrong(&spot, format!("secret {name:?} is there already"));
            }
            secrets.push(name);
        }
        Names {
            timeouts,
            retries,
            errors,
            authentications,
            secrets,
            functions: functions
                .iter()
                .flat_map(Fields::all)
                .map(|(name, _)| name)
                .collect(),
        }
    }

    /// Finds what a name stands for.
    fn named_in<'n>(
        &mut self,
        what: &str,
        group: &Option<Fields<'n>>,
        spot: &Spot<'_>,
        name: &str,
    ) -> Option<Spot<'n>> {
        let found = group.as_ref().and_then(|fields| fields.get(name));
        if found.is_none() {
            let known = group.iter().flat_map(Fields::all).map(|(name, _)| name);
            self.unresolved(spot, name, what, known);
        }
        found
    }

    pub(super) fn timeout(
        &mut self,
        spot: &Spot<'_>,
        names: &Names<'_>,
        scope: &Scope,
    ) -> Option<Timeout> {
        match spot.text() {
            Some(name) => {
                let spot = self.named_in("use.timeouts", &names.timeouts, spot, name)?;
                self.own_timeout(&spot, scope)
            }
            None => self.own_timeout(spot, scope),
        }
    }

    pub(super) fn own_timeout(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<Timeout> {
        let fields = self.object("timeout", spot)?;
        self.only(&fields, &["after"]);
        let Some(after) = fields.get("after") else {
            self.missing(&fields, "after", "after: { seconds: 30 }");
            return None;
        };
        let after = self.period("after", &after, scope)?;
        Some(Timeout { after })
    }

    pub(super) fn error(
        &mut self,
        spot: &Spot<'_>,
        names: &Names<'_>,
        scope: &Scope,
    ) -> Option<ErrorDefinition> {
        match spot.text() {
            Some(name) => {
                let spot = self.named_in("use.errors", &names.errors, spot, name)?;
                self.own_error(&spot, scope)
            }
            None => self.own_error(spot, scope),
        }
    }

    pub(super) fn own_error(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<ErrorDefinition> {
        let fields = self.object("error", spot)?;
        self.only(&fields, error_fields(&fields));
        let type_ = match fields.get("type") {
            Some(spot) => self.uri("type", &spot, scope),
            None => {
                let example = "a URI, such as https://example.com/errors/out-of-stock";
                self.missing(&fields, "type", example);
                None
            }
        };
        let status = match fields.get("status") {
            Some(spot) => self.status(&spot),
            None => {
                self.missing(&fields, "status", "status: 400");
                None
            }
        };
        let mut text = |name: &str| {
            let spot = fields.get(name)?;
            self.template(name, &spot, scope)
        };
        let instance = text("instance");
        let title = text("title");
        let detail = text("detail");
        let details = text("details");
        if let Some(spot) = fields.get("details").filter(|_| detail.is_some()) {
            self.wrong_name(&spot, "detail and details are one: leave out details");
        }
        if let Some(spot) = fields.get("instance")
            && let Some(instance) = &instance
            && !(instance.is_empty() || instance.starts_with('/') || instance.contains("${"))
        {
            let says = "instance must be a JSON pointer, such as /do/0/name";
            self.wrong(&spot, says);
        }
        Some(ErrorDefinition {
            type_: type_?,
            status: status?,
            instance,
            title,
            detail: detail.or(details),
        })
    }

    pub(super) fn status(&mut self, spot: &Spot<'_>) -> Option<i64> {
        let status = self.whole("status", spot)?;
        if !(100..=599).contains(&status) {
            self.wrong(spot, "status must be a status of HTTP, 100 to 599");
        }
        Some(status)
    }

    pub(super) fn retry(
        &mut self,
        spot: &Spot<'_>,
        names: &Names<'_>,
        scope: &Scope,
    ) -> Option<RetryPolicy> {
        match spot.text() {
            Some(name) => {
                let spot = self.named_in("use.retries", &names.retries, spot, name)?;
                self.used_retries.insert(name.to_owned());
                self.own_retry(&spot, scope)
            }
            None => self.own_retry(spot, scope),
        }
    }

    pub(super) fn own_retry(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<RetryPolicy> {
        let fields = self.object("retry", spot)?;
        self.only(&fields, &RETRY_FIELDS);
        let mut policy = RetryPolicy::default();
        if let Some(spot) = fields.get("when") {
            policy.when = self.condition("when", &spot, scope);
        }
        if let Some(spot) = fields.get("exceptWhen") {
            policy.except_when = self.condition("exceptWhen", &spot, scope);
        }
        if let Some(spot) = fields.get("delay") {
            policy.delay = self.period("delay", &spot, scope);
        }
        if let Some(spot) = fields.get("backoff") {
            policy.backoff = self.backoff(&spot);
        }
        if let Some(spot) = fields.get("limit") {
            self.limit(&spot, scope, &mut policy);
        }
        if let Some(spot) = fields.get("jitter") {
            policy.jitter = self.jitter(&spot, scope);
        }
        Some(policy)
    }

    fn backoff(&mut self, spot: &Spot<'_>) -> Option<RetryBackoff> {
        let fields = self.object("backoff", spot)?;
        let known = [
            ("constant", RetryBackoff::Constant),
            ("linear", RetryBackoff::Linear),
            ("exponential", RetryBackoff::Exponential),
        ];
        self.only(&fields, &known.map(|(name, _)| name));
        let mut found = None;
        for (name, spot) in fields.all() {
            let Some((_, backoff)) = known.iter().find(|(known, _)| *known == name) else {
                continue;
            };
            if found.is_some() {
                let says = "backoff is one of constant, linear, exponential; this is a second one";
                self.wrong_name(&spot, says);
            }
            found = Some(*backoff);
            if let Some(fields) = self.object(name, &spot)
                && let Some((field, spot)) = fields.all().next()
            {
                let field = shorten(field, ECHO);
                let says = format!("unknown field {field:?}; {name} has none: {name}: {{}}");
                self.wrong_name(&spot, says);
            }
        }
        if fields.entries.is_empty() {
            self.wrong(
                spot,
                "backoff must have constant, linear or exponential: exponential: {}",
            );
        }
        found
    }

    fn limit(&mut self, spot: &Spot<'_>, scope: &Scope, policy: &mut RetryPolicy) {
        let Some(fields) = self.object("limit", spot) else {
            return;
        };
        self.only(&fields, &["attempt", "duration"]);
        if let Some(spot) = fields.get("duration") {
            policy.duration = self.period("limit.duration", &spot, scope);
        }
        let Some(attempt) = fields
            .get("attempt")
            .and_then(|spot| self.object("limit.attempt", &spot))
        else {
            return;
        };
        self.only(&attempt, &["count", "duration"]);
        if let Some(spot) = attempt.get("duration") {
            policy.attempt_duration = self.period("limit.attempt.duration", &spot, scope);
        }
        if let Some(spot) = attempt.get("count") {
            let count = self.whole("limit.attempt.count", &spot);
            policy.attempts = count.and_then(|count| u64::try_from(count).ok());
            if count.is_some() && policy.attempts.is_none() {
                self.wrong(&spot, "limit.attempt.count must be 0 or more");
            }
        }
    }

    fn jitter(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<(Period, Period)> {
        let fields = self.object("jitter", spot)?;
        self.only(&fields, &["from", "to"]);
        let mut end = |name: &str, example: &str| match fields.get(name) {
            Some(spot) => self.period(&format!("jitter.{name}"), &spot, scope),
            None => {
                self.missing(&fields, name, example);
                None
            }
        };
        let from = end("from", "from: { milliseconds: 0 }");
        let to = end("to", "to: { milliseconds: 500 }");
        let (from, to) = (from?, to?);
        if let (Period::Fixed(least), Period::Fixed(most)) = (&from, &to)
            && least > most
        {
            self.wrong(spot, "jitter.from is longer than jitter.to");
        }
        Some((from, to))
    }

    pub(super) fn authentication(
        &mut self,
        spot: &Spot<'_>,
        names: &Names<'_>,
        scope: &Scope,
    ) -> Option<Authentication> {
        let fields = self.object("authentication", spot)?;
        let Some(name) = fields.get("use") else {
            return self.own_authentication(spot, names, scope);
        };
        self.only(&fields, &["use"]);
        let text = self.text("use", &name)?;
        let group = &names.authentications;
        let spot = self.named_in("use.authentications", group, &name, text)?;
        self.own_authentication(&spot, names, scope)
    }

    pub(super) fn own_authentication(
        &mut self,
        spot: &Spot<'_>,
        names: &Names<'_>,
        scope: &Scope,
    ) -> Option<Authentication> {
        let fields = self.object("authentication", spot)?;
        let mut found = None;
        for (name, spot) in fields.all() {
            match name {
                "basic" | "bearer" => {}
                "digest" | "oauth2" | "oidc" => {
                    let what = format!("authentication {name}");
                    self.not_yet(&spot, &what, "basic and bearer work");
                }
                _ => {
                    self.unknown(&spot, name, &["basic", "bearer", "use"]);
                    continue;
                }
            }
            if found.is_some() {
                self.wrong_name(&spot, "authentication is of one kind; this is a second one");
            }
            found = Some(match name {
                "basic" => self.basic(&spot, names, scope),
                "bearer" => self.bearer(&spot, names, scope),
                _ => None,
            });
        }
        if fields.entries.is_empty() {
            self.wrong(spot, "authentication must have basic, bearer or use");
        }
        found.flatten()
    }

    fn basic(
        &mut self,
        spot: &Spot<'_>,
        names: &Names<'_>,
        scope: &Scope,
    ) -> Option<Authentication> {
        let fields = self.object("basic", spot)?;
        if let Some(secret) = fields.get("use") {
            self.only(&fields, &["use"]);
            return self.secret(&secret, names).map(Authentication::BasicSecret);
        }
        self.only(&fields, &["username", "password", "use"]);
        let username = self.credential(&fields, "username", scope);
        let password = self.credential(&fields, "password", scope);
        Some(Authentication::Basic {
            username: username?,
            password: password?,
        })
    }

    fn bearer(
        &mut self,
        spot: &Spot<'_>,
        names: &Names<'_>,
        scope: &Scope,
    ) -> Option<Authentication> {
        let fields = self.object("bearer", spot)?;
        if let Some(secret) = fields.get("use") {
            self.only(&fields, &["use"]);
            return self
                .secret(&secret, names)
                .map(Authentication::BearerSecret);
        }
        self.only(&fields, &["token", "use"]);
        let token = self.credential(&fields, "token", scope)?;
        Some(Authentication::Bearer { token })
    }

    fn credential(&mut self, fields: &Fields<'_>, name: &str, scope: &Scope) -> Option<String> {
        match fields.get(name) {
            Some(spot) => self.template(name, &spot, scope),
            None => {
                self.missing(fields, name, "or use: the name of a secret");
                None
            }
        }
    }

    fn secret(&mut self, spot: &Spot<'_>, names: &Names<'_>) -> Option<String> {
        let name = self.text("use", spot)?;
        if !names.secrets.contains(&name) {
            self.unresolved(spot, name, "use.secrets", names.secrets.iter().copied());
        }
        Some(name.to_owned())
    }

    pub(super) fn input(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<Input> {
        let fields = self.object("input", spot)?;
        self.only(&fields, &["schema", "from"]);
        Some(Input {
            schema: fields.get("schema").and_then(|spot| self.schema(&spot)),
            from: fields
                .get("from")
                .and_then(|spot| self.transform("input.from", &spot, scope)),
        })
    }

    pub(super) fn output(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<Output> {
        let scope = &with_output(scope);
        let fields = self.object("output", spot)?;
        self.only(&fields, &["schema", "as"]);
        Some(Output {
            schema: fields.get("schema").and_then(|spot| self.schema(&spot)),
            as_: fields
                .get("as")
                .and_then(|spot| self.transform("output.as", &spot, scope)),
        })
    }

    pub(super) fn export(&mut self, spot: &Spot<'_>, scope: &Scope) -> Option<Export> {
        let scope = &with_output(scope);
        let fields = self.object("export", spot)?;
        self.only(&fields, &["schema", "as"]);
        Some(Export {
            schema: fields.get("schema").and_then(|spot| self.schema(&spot)),
            as_: fields
                .get("as")
                .and_then(|spot| self.transform("export.as", &spot, scope)),
        })
    }

    fn schema(&mut self, spot: &Spot<'_>) -> Option<Schema> {
        let fields = self.object("schema", spot)?;
        if let Some(spot) = fields.get("resource") {
            let instead = "write the schema itself: document: { type: object }";
            self.not_yet(&spot, "schemas from elsewhere", instead);
        }
        self.only(&fields, &["format", "document", "resource"]);
        if let Some(spot) = fields.get("format")
            && let Some(format) = self.text("schema.format", &spot)
            && format != "json"
            && !format.starts_with("json:")
        {
            let format = shorten(format, ECHO);
            let says = format!("schema.format is {format:?}; expected json");
            self.wrong(&spot, says);
        }
        let Some(document) = fields.get("document") else {
            if fields.get("resource").is_none() {
                self.missing(&fields, "document", "document: { type: object }");
            }
            return None;
        };
        self.check_schema(&document);
        Some(Schema(document.node.to_value()))
    }
}

/// The fields of an error. 1.0.3 has `details` where the specification has `detail` today.
pub(super) fn error_fields(fields: &Fields<'_>) -> &'static [&'static str] {
    const FIELDS: [&str; 6] = ["type", "status", "instance", "title", "detail", "details"];
    match fields.get("details") {
        Some(_) => &FIELDS,
        None => &FIELDS[..5],
    }
}

fn with_output(scope: &Scope) -> Scope {
    let mut scope = scope.clone();
    scope.push(expressions::OUTPUT.to_owned());
    scope
}
