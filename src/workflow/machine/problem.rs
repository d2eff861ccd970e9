//! Errors of the language: problem documents.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Types of errors begin with one of these: both namespaces of the specification, and the folders
/// that its text, its examples and its conformance kit use.
const PREFIXES: [&str; 6] = [
    "https://open-workflow-specification.org/spec/1.0.0/errors/",
    "https://open-workflow-specification.org/dsl/errors/types/",
    "https://open-workflow-specification.org/errors/types/",
    "https://serverlessworkflow.io/spec/1.0.0/errors/",
    "https://serverlessworkflow.io/dsl/errors/types/",
    "https://serverlessworkflow.io/errors/types/",
];

/// An error as the specification has it: a problem document of RFC 7807.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// A URI reference.
    #[serde(rename = "type")]
    pub type_: String,
    pub status: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// A JSON pointer to the task that failed, such as `/do/0/greet`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
}

/// The types of errors that a runtime raises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    Configuration,
    Validation,
    Expression,
    Authentication,
    Authorization,
    Timeout,
    Communication,
    Runtime,
}

impl ProblemKind {
    const ALL: [Self; 8] = [
        Self::Configuration,
        Self::Validation,
        Self::Expression,
        Self::Authentication,
        Self::Authorization,
        Self::Timeout,
        Self::Communication,
        Self::Runtime,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::Validation => "validation",
            Self::Expression => "expression",
            Self::Authentication => "authentication",
            Self::Authorization => "authorization",
            Self::Timeout => "timeout",
            Self::Communication => "communication",
            Self::Runtime => "runtime",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Configuration => "Configuration Error",
            Self::Validation => "Validation Error",
            Self::Expression => "Expression Error",
            Self::Authentication => "Authentication Error",
            Self::Authorization => "Authorization Error",
            Self::Timeout => "Timeout Error",
            Self::Communication => "Communication Error",
            Self::Runtime => "Runtime Error",
        }
    }

    fn status(self) -> i64 {
        match self {
            Self::Configuration | Self::Validation | Self::Expression => 400,
            Self::Authentication => 401,
            Self::Authorization => 403,
            Self::Timeout => 408,
            Self::Communication | Self::Runtime => 500,
        }
    }
}

impl Problem {
    /// An error that the runtime raises at `instance`.
    pub fn new(kind: ProblemKind, instance: &str, detail: impl Into<String>) -> Self {
        Self {
            type_: format!("{}{}", PREFIXES[0], kind.name()),
            status: kind.status(),
            title: Some(kind.title().to_owned()),
            detail: Some(detail.into()),
            instance: Some(instance.to_owned()),
        }
    }

    /// The error of a task that took longer than its timeout.
    pub(super) fn timed_out(path: &str) -> Self {
        Self::new(
            ProblemKind::Timeout,
            path,
            "it took longer than its timeout",
        )
    }

    /// The error that the death of a step becomes.
    ///
    /// A reason that is a JSON object with `type` and `status` is the error itself. Any other
    /// reason is the detail of an error of type `runtime`.
    pub(super) fn of_death(reason: &str, path: &str) -> Self {
        match Self::read(reason) {
            Some(mut problem) => {
                problem.instance.get_or_insert_with(|| path.to_owned());
                let kind = ProblemKind::ALL
                    .into_iter()
                    .find(|kind| known_name(&problem.type_) == Some(kind.name()));
                if let Some(kind) = kind {
                    problem.title.get_or_insert_with(|| kind.title().to_owned());
                }
                problem
            }
            None => Self::new(ProblemKind::Runtime, path, reason),
        }
    }

    fn read(reason: &str) -> Option<Self> {
        if !reason.trim_start().starts_with('{') {
            return None;
        }
        // The queue may add to a reason why it gives up.
        let mut values = serde_json::Deserializer::from_str(reason).into_iter::<Value>();
        let value = values.next()?.ok()?;
        let text = |name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
        Some(Self {
            type_: text("type")?,
            status: value.get("status")?.as_i64()?,
            title: text("title"),
            detail: text("detail"),
            instance: text("instance"),
        })
    }

    /// About its bytes in JSON.
    pub(super) fn bytes(&self) -> usize {
        let texts = [&self.title, &self.detail, &self.instance];
        let texts = texts.into_iter().flatten().map(String::len);
        self.type_.len() + texts.sum::<usize>() + 64
    }

    /// The error as a value of the language.
    pub fn to_value(&self) -> Value {
        let mut value = serde_json::Map::new();
        value.insert("type".to_owned(), self.type_.clone().into());
        value.insert("status".to_owned(), self.status.into());
        let texts = [
            ("title", &self.title),
            ("detail", &self.detail),
            ("instance", &self.instance),
        ];
        for (name, text) in texts {
            if let Some(text) = text {
                value.insert(name.to_owned(), text.clone().into());
            }
        }
        Value::Object(value)
    }

    /// Whether both URIs name the same type: they are equal, or each has a known prefix and their
    /// last segments are equal.
    pub(super) fn is_same_type(one: &str, other: &str) -> bool {
        if one == other {
            return true;
        }
        match (known_name(one), known_name(other)) {
            (Some(one), Some(other)) => one == other,
            _ => false,
        }
    }
}

/// What follows a known prefix.
fn known_name(type_: &str) -> Option<&str> {
    PREFIXES
        .into_iter()
        .find_map(|prefix| type_.strip_prefix(prefix))
}
