//! A statement with its values.
//!
//! Statements for many rows come in a few sizes only, so that each connection can keep them
//! prepared.

use std::borrow::Cow;

use uuid::Uuid;

use crate::model::{
    Encoding, ExecutionId, KeyHash, LetterKind, Priority, QueueName, SecretHash, StoredStatus,
    TaskId,
};
use crate::store::{Turn, Unpublished};

/// The numbers of rows that a statement can have. SQLite allows 500 terms in a compound SELECT and
/// 32,766 values.
const SIZES: [usize; 5] = [1, 4, 16, 64, 256];
const LARGEST: usize = SIZES[SIZES.len() - 1];

/// The maximum size of a statement with more than one row, in bytes. MariaDB accepts 16 MiB by
/// default.
const MAX_BYTES: usize = 4 << 20;

/// A value to bind, possibly borrowed from the caller.
#[derive(Clone)]
pub enum Value<'a> {
    Int(i64),
    Text(Cow<'a, str>),
    Bytes(Cow<'a, [u8]>),
}

macro_rules! value {
    ($($from:ty => |$v:ident| $value:expr;)*) => {
        $(impl<'a> From<$from> for Value<'a> {
            fn from($v: $from) -> Self {
                $value
            }
        })*
    };
}
value! {
    i64 => |v| Value::Int(v);
    &'a i64 => |v| Value::Int(*v);
    u32 => |v| Value::Int(v.into());
    bool => |v| Value::Int(v.into());
    // Counters from zero and milliseconds stay far below 2^63.
    u64 => |v| Value::Int(i64::try_from(v).unwrap_or(i64::MAX));
    StoredStatus => |v| Value::Int(v as i64);
    Priority => |v| Value::Int(v as i64);
    Encoding => |v| Value::Int(v as i64);
    LetterKind => |v| Value::Int(v as i64);
    Unpublished => |v| Value::Int(v as i64);
    Turn => |v| Value::Int(v.0);
    &'a Turn => |v| Value::Int(v.0);
    String => |v| Value::Text(v.into());
    &'a str => |v| Value::Text(v.into());
    &'a QueueName => |v| Value::Text(v.as_str().into());
    &'a &'a QueueName => |v| Value::Text(v.as_str().into());
    &'a &'a str => |v| Value::Text((*v).into());
    &'a [u8] => |v| Value::Bytes(v.into());
    Vec<u8> => |v| Value::Bytes(v.into());
    &'a Vec<u8> => |v| Value::Bytes(v.as_slice().into());
    &'a TaskId => |v| Value::Bytes(v.as_bytes().as_slice().into());
    &'a &'a TaskId => |v| Value::Bytes(v.as_bytes().as_slice().into());
    &'a ExecutionId => |v| Value::Bytes(v.as_bytes().as_slice().into());
    &'a Uuid => |v| Value::Bytes(v.as_bytes().as_slice().into());
    &'a SecretHash => |v| Value::Bytes(v.0.as_slice().into());
    &'a KeyHash => |v| Value::Bytes(v.0.as_slice().into());
    &Value<'a> => |v| v.clone();
}

/// SQL text with the values of its placeholders.
#[derive(Clone)]
pub struct Statement<'a> {
    pub(in crate::store) text: String,
    pub(in crate::store) values: Vec<Value<'a>>,
}

impl<'a> Statement<'a> {
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            values: Vec::new(),
        }
    }

    /// Appends text.
    pub fn sql(mut self, text: &str) -> Self {
        self.text.push_str(text);
        self
    }

    /// Binds the next placeholder.
    pub fn bind(mut self, value: impl Into<Value<'a>>) -> Self {
        self.values.push(value.into());
        self
    }

    /// Binds the [era](super::tasks::era), if its place is a placeholder.
    pub fn bind_era(mut self, era: Option<i64>) -> Self {
        self.values.extend(era.map(Value::from));
        self
    }

    /// Makes the statement independent of its caller, so that another thread can run it.
    pub(in crate::store) fn into_owned(self) -> Statement<'static> {
        let values = self.values.into_iter().map(|value| match value {
            Value::Int(int) => Value::Int(int),
            Value::Text(text) => Value::Text(text.into_owned().into()),
            Value::Bytes(bytes) => Value::Bytes(bytes.into_owned().into()),
        });
        Statement {
            text: self.text,
            values: values.collect(),
        }
    }

    /// Appends another statement with its values.
    pub fn append(mut self, part: Statement<'a>) -> Self {
        self.text.push_str(&part.text);
        self.values.extend(part.values);
        self
    }

    /// Appends `(?, ?, …)` for an `IN`, padded to the next size by repeating the last item.
    pub fn list<T>(mut self, items: &'a [T]) -> Self
    where
        &'a T: Into<Value<'a>>,
    {
        let size = SIZES
            .into_iter()
            .find(|size| *size >= items.len())
            .unwrap_or(items.len());
        self.text
            .push_str(&format!("({})", vec!["?"; size].join(", ")));
        let padding = items.last().into_iter().cycle().take(size - items.len());
        self.values
            .extend(items.iter().chain(padding).map(Into::into));
        self
    }

    /// Appends the text `row` once for each row, separated by `between`.
    pub fn rows(
        mut self,
        row: &str,
        between: &str,
        rows: impl Iterator<Item = impl IntoIterator<Item = Value<'a>>>,
    ) -> Self {
        for (i, values) in rows.enumerate() {
            if i > 0 {
                self.text.push_str(between);
            }
            self.text.push_str(row);
            self.values.extend(values);
        }
        self
    }

    /// Appends `VALUES (?, …), (?, …), …`.
    pub fn values<const N: usize>(self, rows: impl Iterator<Item = [Value<'a>; N]>) -> Self {
        self.values_of(N, rows)
    }

    /// Appends `VALUES` with `columns` placeholders in each row.
    pub fn values_of(
        self,
        columns: usize,
        rows: impl Iterator<Item = impl IntoIterator<Item = Value<'a>>>,
    ) -> Self {
        let row = format!("({})", vec!["?"; columns].join(", "));
        self.sql(" VALUES ").rows(&row, ", ", rows)
    }
}

/// Splits `items` into pieces that fit into a list.
pub(super) fn lists<T>(items: &[T]) -> impl Iterator<Item = &[T]> {
    items.chunks(LARGEST)
}

/// Splits `rows` into pieces of the prepared sizes, none of them larger than a server accepts.
pub(super) fn pieces<T>(rows: &[T], weight: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut rest = rows;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fit = rest.iter().take(LARGEST).take_while(|row| {
            bytes += weight(row);
            bytes <= MAX_BYTES
        });
        let fit = fit.count().max(1);
        let size = SIZES
            .into_iter()
            .rev()
            .find(|size| *size <= fit.min(rest.len()))?;
        let (piece, behind) = rest.split_at(size);
        rest = behind;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_few_sizes_and_bounded_weight() {
        let sizes = |rows: &[usize]| {
            pieces(rows, |weight| *weight)
                .map(<[_]>::len)
                .collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(sizes(&[1; 3]), [1, 1, 1]);
        assert_eq!(sizes(&[1; 1000]), [256, 256, 256, 64, 64, 64, 16, 16, 4, 4]);
        assert_eq!(sizes(&[1 << 20; 6]), [4, 1, 1]);
        assert_eq!(
            sizes(&[8 << 20, 1]),
            [1, 1],
            "one row goes, whatever it weighs"
        );
    }

    #[test]
    fn a_list_is_padded_with_its_last_item() {
        let ids = [TaskId::new(), TaskId::new()];
        let statement = Statement::new("x IN ").list(&ids);
        assert_eq!(statement.text, "x IN (?, ?, ?, ?)");
        assert_eq!(statement.values.len(), 4);
    }
}
