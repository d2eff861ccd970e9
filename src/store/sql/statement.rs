//! A statement and its values, and how each database runs it.
//!
//! Statements over many rows come in few shapes, so that every connection keeps them prepared.

use std::borrow::Cow;

use sqlx::{Arguments, AssertSqlSafe, Database, FromRow, MySql, MySqlConnection, Sqlite, SqliteConnection};
use sqlx::{mysql::MySqlRow, sqlite::SqliteRow};

use super::{Dialect, pooled::answered};
use crate::model::{Encoding, KeyHash, Priority, QueueName, StoredStatus, TaskId};
use crate::store::{Turn, Unpublished};

/// How many rows one statement may hold. SQLite allows 500 terms in a compound select and 32,766 values.
const SIZES: [usize; 5] = [1, 4, 16, 64, 256];
const LARGEST: usize = SIZES[SIZES.len() - 1];

/// How many bytes one statement may hold, unless it is a single row. MariaDB takes 16 MiB by default.
const MAX_BYTES: usize = 4 << 20;

/// Something to bind.
#[derive(Clone)]
pub enum Value<'a> {
    Int(i64),
    Text(Cow<'a, str>),
    Bytes(&'a [u8]),
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
    u32 => |v| Value::Int(v.into());
    bool => |v| Value::Int(v.into());
    // Numbers that count up from zero or are milliseconds: none comes near 2^63.
    u64 => |v| Value::Int(i64::try_from(v).unwrap_or(i64::MAX));
    StoredStatus => |v| Value::Int(v as i64);
    Priority => |v| Value::Int(v as i64);
    Encoding => |v| Value::Int(v as i64);
    Unpublished => |v| Value::Int(v as i64);
    Turn => |v| Value::Int(v.0);
    &'a Turn => |v| Value::Int(v.0);
    String => |v| Value::Text(v.into());
    &'a str => |v| Value::Text(v.into());
    &'a QueueName => |v| Value::Text(v.as_str().into());
    &'a &'a QueueName => |v| Value::Text(v.as_str().into());
    &'a [u8] => |v| Value::Bytes(v);
    &'a TaskId => |v| Value::Bytes(v.as_bytes());
    &'a KeyHash => |v| Value::Bytes(&v.0);
}

/// SQL and what its question marks stand for.
#[derive(Clone)]
pub struct Statement<'a> {
    text: String,
    values: Vec<Value<'a>>,
}

impl<'a> Statement<'a> {
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), values: Vec::new() }
    }

    /// More text.
    pub fn sql(mut self, text: &str) -> Self {
        self.text.push_str(text);
        self
    }

    /// The value of the next question mark.
    pub fn bind(mut self, value: impl Into<Value<'a>>) -> Self {
        self.values.push(value.into());
        self
    }

    /// A part with values of its own.
    pub fn append(mut self, part: Statement<'a>) -> Self {
        self.text.push_str(&part.text);
        self.values.extend(part.values);
        self
    }

    /// `(?, ?, …)` for an `IN`. The last item is repeated up to the next size, which changes nothing.
    pub fn list<T>(mut self, items: &'a [T]) -> Self
    where
        &'a T: Into<Value<'a>>,
    {
        let size = SIZES.into_iter().find(|size| *size >= items.len()).unwrap_or(items.len());
        self.text.push_str(&format!("({})", vec!["?"; size].join(", ")));
        let padding = items.last().into_iter().cycle().take(size - items.len());
        self.values.extend(items.iter().chain(padding).map(Into::into));
        self
    }

    /// `row` once per row, with `between` between them.
    pub fn rows<const N: usize>(
        mut self,
        row: &str,
        between: &str,
        rows: impl Iterator<Item = [Value<'a>; N]>,
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

    /// `VALUES (?, …), (?, …), …`
    pub fn values<const N: usize>(self, rows: impl Iterator<Item = [Value<'a>; N]>) -> Self {
        let row = format!("({})", ["?"; N].join(", "));
        self.sql(" VALUES ").rows(&row, ", ", rows)
    }
}

/// `items` in pieces that a statement can list.
pub(super) fn lists<T>(items: &[T]) -> impl Iterator<Item = &[T]> {
    items.chunks(LARGEST)
}

/// `rows` in pieces of the sizes that are prepared, none with more bytes than a server would take.
pub(super) fn pieces<T>(rows: &[T], weight: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut rest = rows;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fit = rest.iter().take(LARGEST).take_while(|row| {
            bytes += weight(row);
            bytes <= MAX_BYTES
        });
        let fit = fit.count().max(1);
        let size = SIZES.into_iter().rev().find(|size| *size <= fit.min(rest.len()))?;
        let (piece, behind) = rest.split_at(size);
        rest = behind;
        Some(piece)
    })
}

/// What can be read out of rows of both databases.
pub trait Columns: for<'r> FromRow<'r, SqliteRow> + for<'r> FromRow<'r, MySqlRow> + Send + Unpin {}
impl<T> Columns for T where T: for<'r> FromRow<'r, SqliteRow> + for<'r> FromRow<'r, MySqlRow> + Send + Unpin {}

/// A connection, inside or outside of a transaction.
pub trait Session: Dialect + Send {
    /// Runs a command without values and rows. It need not be preparable.
    fn command(&mut self, sql: &'static str) -> impl Future<Output = sqlx::Result<()>> + Send;

    /// Answers how many rows it inserted, deleted, or found to update.
    fn execute(&mut self, statement: Statement<'_>) -> impl Future<Output = sqlx::Result<u64>> + Send;

    fn fetch<T: Columns>(&mut self, statement: Statement<'_>) -> impl Future<Output = sqlx::Result<Vec<T>>> + Send;
}

fn arguments<DB: Database>(values: Vec<Value<'_>>) -> sqlx::Result<DB::Arguments>
where
    DB::Arguments: Arguments<Database = DB>,
    i64: for<'q> sqlx::Encode<'q, DB> + sqlx::Type<DB>,
    String: for<'q> sqlx::Encode<'q, DB> + sqlx::Type<DB>,
    for<'v> &'v str: sqlx::Encode<'v, DB> + sqlx::Type<DB>,
    for<'v> &'v [u8]: sqlx::Encode<'v, DB> + sqlx::Type<DB>,
{
    let mut arguments = DB::Arguments::default();
    arguments.reserve(values.len(), 0);
    for value in values {
        match value {
            Value::Int(int) => arguments.add(int),
            Value::Text(Cow::Owned(text)) => arguments.add(text),
            Value::Text(Cow::Borrowed(text)) => arguments.add(text),
            Value::Bytes(bytes) => arguments.add(bytes),
        }
        .map_err(sqlx::Error::Encode)?;
    }
    Ok(arguments)
}

// AssertSqlSafe: the texts are ours, whatever came from outside is bound.
macro_rules! session {
    ($connection:ty, $db:ty $(, $check:path)?) => {
        impl Session for $connection {
            async fn command(&mut self, sql: &'static str) -> sqlx::Result<()> {
                answered(Self::ANSWER_WITHIN, sqlx::raw_sql(sql).execute(self)).await.map(drop)
            }

            async fn execute(&mut self, statement: Statement<'_>) -> sqlx::Result<u64> {
                $(#[cfg(test)] $check(self, &statement.text).await?;)?
                let arguments = arguments::<$db>(statement.values)?;
                let done = sqlx::query_with::<$db, _>(AssertSqlSafe(statement.text), arguments).execute(self);
                Ok(answered(Self::ANSWER_WITHIN, done).await?.rows_affected())
            }

            async fn fetch<T: Columns>(&mut self, statement: Statement<'_>) -> sqlx::Result<Vec<T>> {
                $(#[cfg(test)] $check(self, &statement.text).await?;)?
                let arguments = arguments::<$db>(statement.values)?;
                let rows = sqlx::query_as_with::<$db, T, _>(AssertSqlSafe(statement.text), arguments).fetch_all(self);
                answered(Self::ANSWER_WITHIN, rows).await
            }
        }
    };
}
session!(SqliteConnection, Sqlite, super::plans::check);
session!(MySqlConnection, MySql);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_few_sizes_and_bounded_weight() {
        let sizes = |rows: &[usize]| pieces(rows, |weight| *weight).map(<[_]>::len).collect::<Vec<_>>();
        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(sizes(&[1; 3]), [1, 1, 1]);
        assert_eq!(sizes(&[1; 1000]), [256, 256, 256, 64, 64, 64, 16, 16, 4, 4]);
        assert_eq!(sizes(&[1 << 20; 6]), [4, 1, 1]);
        assert_eq!(sizes(&[8 << 20, 1]), [1, 1], "one row goes, whatever it weighs");
    }

    #[test]
    fn a_list_is_padded_with_its_last_item() {
        let ids = [TaskId::new(), TaskId::new()];
        let statement = Statement::new("x IN ").list(&ids);
        assert_eq!(statement.text, "x IN (?, ?, ?, ?)");
        assert_eq!(statement.values.len(), 4);
    }
}
