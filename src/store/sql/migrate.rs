//! Migrates the schema at a start.
//!
//! MySQL and MariaDB commit at each statement that changes the schema. A start that is killed
//! during a migration leaves a migration of which only the first statements took effect. sqlx
//! records that (`success = FALSE`) and refuses to continue. Therefore taskd must be able to
//! execute each statement of a migration again, and skips objects that already exist. A migration
//! never drops what it created, and changes data only in a repeatable way.
//!
//! A taskd that knows fewer migrations than the database has may use it if the migrations allow it:
//! `meta.lowest_schema` is the lowest schema that a taskd must know.

use sqlx::{
    SqlStr,
    migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator},
};

use super::{rows::corrupt, session::Session, statement::Statement};
use crate::store::{Error, Result};

const TABLE: &str = "_sqlx_migrations";

/// A migration file: its name (`<version>_<description>`) and its SQL.
pub(crate) type MigrationFile = (&'static str, &'static str);

/// The migration files of one backend. All backends have the same ones.
macro_rules! migration_files {
    ($backend:literal) => {
        migration_files!(
            $backend:
            "0001_create_store",
        )
    };
    ($backend:literal: $($name:literal,)+) => {
        &[$((
            $name,
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/", $backend, "/", $name, ".sql")),
        )),+]
    };
}
pub(crate) use migration_files;

/// The same migrator that `sqlx::migrate!` would create from these files. The macro would compile
/// sqlx a second time.
fn migrator(files: &[MigrationFile]) -> Migrator {
    let migrations = files.iter().map(|&(name, sql)| {
        let (version, description) = name
            .split_once('_')
            .expect("a migration's name has a version and a description");
        let version = version.parse().expect("a migration's version is a number");
        let description = description.replace('_', " ").into();
        Migration::new(
            version,
            description,
            MigrationType::Simple,
            SqlStr::from_static(sql),
            false,
        )
    });
    Migrator::with_migrations(migrations.collect())
}

/// Applies the missing migrations. Returns how many it applied or completed.
///
/// The caller must keep other processes from doing the same at the same time.
pub(in crate::store) async fn run<C: Session + Migrate>(
    migrations: &'static [MigrationFile],
    connection: &mut C,
) -> Result<usize> {
    let is_transient = |error: &MigrateError| match error {
        MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _) => {
            C::is_transient(cause)
        }
        _ => false,
    };
    apply(migrations, connection)
        .await
        .map_err(|error| match error {
            Error::Migrate(cause) if is_transient(&cause) => Error::Transient(cause.into()),
            other => other,
        })
}

async fn apply<C: Session + Migrate>(
    migrations: &'static [MigrationFile],
    connection: &mut C,
) -> Result<usize> {
    let mut migrator = migrator(migrations);
    connection.ensure_migrations_table(TABLE).await?;
    check_known(&migrator, connection).await?;
    let finished = finish_interrupted(&migrator, connection).await?;
    let before = connection.list_applied_migrations(TABLE).await?.len();
    migrator
        .set_ignore_missing(true)
        .run_direct(None, connection, false)
        .await?;
    let after = connection.list_applied_migrations(TABLE).await?.len();
    Ok(finished + after - before)
}

/// Rejects a schema that needs a newer taskd.
async fn check_known<C: Session + Migrate>(migrator: &Migrator, connection: &mut C) -> Result<()> {
    let knows = migrator
        .iter()
        .map(|migration| migration.version)
        .max()
        .unwrap_or(0);
    let applied = connection.list_applied_migrations(TABLE).await?;
    let schema = applied
        .iter()
        .map(|migration| migration.version)
        .max()
        .unwrap_or(0);
    if schema <= knows {
        return Ok(());
    }
    let lowest = Statement::new("SELECT value FROM meta WHERE name = 'lowest_schema'");
    let lowest: Vec<(String,)> = connection.fetch(lowest).await?;
    let needs = match lowest.first() {
        Some((number,)) => number
            .parse()
            .map_err(|_| corrupt(format!("the lowest_schema {number:?}")))?,
        // No migration says what it needs, so assume the whole schema.
        None => schema,
    };
    if needs > knows {
        Err(Error::TooNew {
            schema,
            needs,
            knows,
        })
    } else {
        Ok(())
    }
}

/// Completes the migrations that a killed start left unfinished. Returns how many.
async fn finish_interrupted<C: Session + Migrate>(
    migrator: &Migrator,
    connection: &mut C,
) -> Result<usize> {
    let interrupted = Statement::new(format!(
        "SELECT version, checksum FROM {TABLE} WHERE success = ? ORDER BY version"
    ));
    let interrupted: Vec<(i64, Vec<u8>)> = connection.fetch(interrupted.bind(false)).await?;
    let mut finished = 0;
    for (version, checksum) in interrupted {
        let same = |migration: &&Migration| {
            migration.version == version && *migration.checksum == *checksum
        };
        // If this taskd has another text for the migration, sqlx reports it.
        let Some(migration) = migrator.iter().find(same) else {
            continue;
        };
        tracing::warn!(version, "migration {version} was interrupted: finishing it");
        for statement in statements(migration.sql.as_str()) {
            match connection.execute_for_long(Statement::new(statement)).await {
                Err(error) if C::is_there_already(&error) => {}
                other => drop(other?),
            }
        }
        let done = Statement::new(format!("UPDATE {TABLE} SET success = ? WHERE version = ?"));
        connection.execute(done.bind(true).bind(version)).await?;
        finished += 1;
    }
    Ok(finished)
}

/// Splits a migration into its statements, without comments. No migration escapes a quote.
fn statements(sql: &str) -> Vec<String> {
    let (mut statements, mut statement, mut quoted) = (Vec::new(), String::new(), false);
    let mut rest = sql.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '-' if !quoted && rest.peek() == Some(&'-') => {
                while rest.next_if(|c| *c != '\n').is_some() {}
            }
            ';' if !quoted => statements.push(std::mem::take(&mut statement)),
            _ => {
                quoted ^= c == '\'';
                statement.push(c);
            }
        }
    }
    statements.push(statement);
    let trimmed = statements
        .into_iter()
        .map(|statement| statement.trim().to_owned());
    trimmed.filter(|statement| !statement.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The parts of a migration that the database stores, or that affect how it is executed.
    fn parts(migrator: &Migrator) -> Vec<(i64, &str, &str, &[u8], bool)> {
        migrator
            .iter()
            .map(|m| {
                (
                    m.version,
                    &*m.description,
                    m.sql.as_str(),
                    &*m.checksum,
                    m.no_tx,
                )
            })
            .collect()
    }

    #[tokio::test]
    async fn the_migrations_in_the_binary_are_those_that_sqlx_finds_in_the_folder() {
        let mysql: &[MigrationFile] = migration_files!("mysql");
        let sqlite: &[MigrationFile] = migration_files!("sqlite");
        for (backend, files) in [("mysql", mysql), ("sqlite", sqlite)] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("migrations")
                .join(backend);
            let found = Migrator::new(folder).await.unwrap();
            assert_eq!(parts(&migrator(files)), parts(&found), "{backend}");
        }
    }

    #[test]
    fn a_migration_falls_into_its_statements() {
        let sql = "-- first; a comment\nCREATE TABLE a (b TEXT DEFAULT ';--' -- c; d\n);\n\n\
                   INSERT INTO a VALUES (REPLACE('x-', '-', ''));\n";
        let expected = [
            "CREATE TABLE a (b TEXT DEFAULT ';--' \n)",
            "INSERT INTO a VALUES (REPLACE('x-', '-', ''))",
        ];
        assert_eq!(statements(sql), expected);
    }
}
