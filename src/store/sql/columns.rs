//! Converts rows of SQLite to values. For MySQL, sqlx does this.

use std::slice::Iter;

use rusqlite::{
    Row,
    types::{FromSqlError, ValueRef},
};

/// A value that is built from a row. Column names are resolved once for all rows of a statement.
pub trait FromRow: Sized {
    /// Adds the names of the columns that it reads by name.
    fn names(_names: &mut Vec<&'static str>) {}

    /// `places` yields the column index of each name.
    fn from_row(row: &Row<'_>, places: &mut Iter<'_, usize>) -> rusqlite::Result<Self>;
}

/// A value that is built from a column.
pub trait Column: Sized {
    fn of(value: ValueRef<'_>) -> Result<Self, FromSqlError>;
}

impl Column for i64 {
    fn of(value: ValueRef<'_>) -> Result<Self, FromSqlError> {
        value.as_i64()
    }
}

impl Column for String {
    fn of(value: ValueRef<'_>) -> Result<Self, FromSqlError> {
        value.as_str().map(str::to_owned)
    }
}

/// Reads a blob or a text.
impl Column for Vec<u8> {
    fn of(value: ValueRef<'_>) -> Result<Self, FromSqlError> {
        value.as_bytes().map(<[u8]>::to_vec)
    }
}

impl<T: Column> Column for Option<T> {
    fn of(value: ValueRef<'_>) -> Result<Self, FromSqlError> {
        (value != ValueRef::Null).then(|| T::of(value)).transpose()
    }
}

pub(super) fn column<T: Column>(row: &Row<'_>, number: usize) -> rusqlite::Result<T> {
    let value = row.get_ref(number)?;
    T::of(value).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(number, value.data_type(), Box::new(error))
    })
}

/// Reads the column of the next name.
pub(super) fn next<T: Column>(row: &Row<'_>, places: &mut Iter<'_, usize>) -> rusqlite::Result<T> {
    column(row, *places.next().expect("each name has a place"))
}

macro_rules! tuple {
    ($($column:ident $number:tt),+) => {
        impl<$($column: Column),+> FromRow for ($($column,)+) {
            fn from_row(row: &Row<'_>, _places: &mut Iter<'_, usize>) -> rusqlite::Result<Self> {
                Ok(($(column::<$column>(row, $number)?,)+))
            }
        }
    };
}
tuple!(A 0);
tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, D 3);
tuple!(A 0, B 1, C 2, D 3, E 4);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9);
