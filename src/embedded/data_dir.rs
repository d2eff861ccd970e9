//! The data folder, which only one taskd at a time uses.

use std::{
    env,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process,
    sync::Arc,
};

use nix::{fcntl::OFlag, unistd::geteuid};
use sha2::{Digest, Sha256};

use super::Error;

/// The longest path of a unix socket that the kernel accepts (`sun_path` without its final NUL).
const MAX_SOCKET_PATH: usize = 107;

/// The data folder, locked while a clone of this lives.
#[derive(Clone, Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: Arc<File>,
}

impl DataDir {
    /// Creates the folder if it is missing, and locks it. The kernel unlocks it however this
    /// process ends.
    pub fn lock(path: impl AsRef<Path>) -> Result<Self, Error> {
        let folder = path.as_ref();
        let fail = |cause| Error::Folder {
            folder: folder.to_owned(),
            cause,
        };
        create_private(folder, true).map_err(fail)?;
        // Absolute, because redis-server works in another folder, and resolved, so that a link that
        // changes later does not move it.
        let path = folder.canonicalize().map_err(fail)?;
        let not_safe = |why| Error::Unsafe {
            folder: folder.to_owned(),
            why,
        };
        if let Some(why) = open_to_others(&path).map_err(fail)? {
            return Err(not_safe(why));
        }
        if let Some(why) = link_in(&path).map_err(fail)? {
            return Err(not_safe(why));
        }
        let mut file = open_lock(&path).map_err(fail)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::InUse {
                    folder: folder.to_owned(),
                    holder: read_pid(&mut file),
                });
            }
            Err(TryLockError::Error(cause)) => return Err(fail(cause)),
        }
        write_pid(&mut file).map_err(fail)?;
        Ok(Self {
            path,
            _lock: Arc::new(file),
        })
    }

    /// The absolute path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a folder in it that only this user may enter.
    pub(super) fn private_folder(&self, name: &str) -> Result<PathBuf, Error> {
        let folder = self.path.join(name);
        match create_private(&folder, true) {
            Ok(()) => Ok(folder),
            Err(cause) => Err(Error::Folder { folder, cause }),
        }
    }

    /// The socket of redis-server: in the folder if the path is short enough, otherwise in a
    /// private one under `temp`.
    pub(super) fn socket(&self, temp: &Path) -> Result<PathBuf, Error> {
        let socket = place_of_socket(&self.path, temp)?;
        let folder = socket.parent().filter(|folder| *folder != self.path);
        if let Some(folder) = folder
            && let Err(cause) = own_folder(folder)
        {
            return Err(Error::SocketFolder {
                folder: folder.to_owned(),
                reason: cause.to_string(),
            });
        }
        Ok(socket)
    }
}

/// Where the socket of a data folder is.
fn place_of_socket(path: &Path, temp: &Path) -> Result<PathBuf, Error> {
    let near = path.join("redis.sock");
    if near.as_os_str().len() <= MAX_SOCKET_PATH {
        return Ok(near);
    }
    let digest = Sha256::digest(path.as_os_str().as_bytes());
    let name: String = digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let far = temp.join(format!("taskd-{name}")).join("redis.sock");
    if far.as_os_str().len() > MAX_SOCKET_PATH {
        let reason = format!("the path is longer than {MAX_SOCKET_PATH} bytes");
        return Err(Error::SocketFolder {
            folder: far,
            reason,
        });
    }
    Ok(far)
}

/// The socket of the redis-server that runs in this folder.
pub(super) fn socket_of_running(folder: &Path) -> Result<PathBuf, Error> {
    let path = folder.canonicalize().map_err(|cause| Error::Folder {
        folder: folder.to_owned(),
        cause,
    })?;
    let socket = place_of_socket(&path, &temp())?;
    match socket.exists() {
        true => Ok(socket),
        false => Err(Error::NotRunning {
            folder: folder.to_owned(),
        }),
    }
}

fn create_private(folder: &Path, parents: bool) -> io::Result<()> {
    DirBuilder::new()
        .mode(0o700)
        .recursive(parents)
        .create(folder)
}

/// Returns why a folder is unsafe, if it is: other users could put links into it that lead to files
/// of this user.
fn open_to_others(folder: &Path) -> io::Result<Option<String>> {
    let found = folder.metadata()?;
    if found.uid() != geteuid().as_raw() && found.uid() != 0 {
        return Ok(Some(format!(
            "it belongs to another user (uid {}); make it this user's",
            found.uid()
        )));
    }
    let mode = found.mode() & 0o777;
    if mode & 0o022 != 0 {
        return Ok(Some(format!(
            "other users may write to it (mode {mode:03o}); chmod 700 it, name a folder in it"
        )));
    }
    if mode & 0o055 != 0 {
        let shown = folder.display();
        tracing::warn!(
            "other users may read the data folder {shown} (mode {mode:03o}); chmod 700 it"
        );
    }
    Ok(None)
}

/// Returns why the folder is unsafe, if it is: a link in it, or in the folders of redis-server in
/// it, would make taskd open another file.
fn link_in(folder: &Path) -> io::Result<Option<String>> {
    let append_only: PathBuf = ["redis", "appendonlydir"].iter().collect();
    for part in [Path::new(""), Path::new("redis"), &append_only] {
        let entries = match fs::read_dir(folder.join(part)) {
            Ok(entries) => entries,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                continue;
            }
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            // The entry may be gone: another taskd may use the folder, and its redis-server removes
            // files.
            let Ok(kind) = entry.file_type() else {
                continue;
            };
            if kind.is_symlink() {
                let name = part.join(entry.file_name());
                let name = name.to_string_lossy();
                let instead = match name.starts_with("taskd.db") {
                    true => {
                        "remove it, name the file it leads to (database_url = \"sqlite://PATH\")"
                    }
                    false => "remove it: taskd would write to the file that it leads to",
                };
                return Ok(Some(format!("{name} in it is a link; {instead}")));
            }
        }
    }
    Ok(None)
}

/// Creates a folder in the temp dir, where every user may create one. If it exists already, it must
/// be private to this user.
fn own_folder(folder: &Path) -> io::Result<()> {
    match create_private(folder, false) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        done => return done,
    }
    let found = folder.symlink_metadata()?;
    if !found.is_dir() {
        return Err(io::Error::other("it is not a folder"));
    }
    if found.uid() != geteuid().as_raw() {
        return Err(io::Error::other(format!(
            "it belongs to another user (uid {})",
            found.uid()
        )));
    }
    if found.mode() & 0o077 != 0 {
        return Err(io::Error::other("it is open to other users"));
    }
    Ok(())
}

fn open_lock(folder: &Path) -> io::Result<File> {
    // Not truncated: until this process has the lock, the file contains the pid of its holder.
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(OFlag::O_NOFOLLOW.bits());
    options.open(folder.join("lock"))
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn write_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    writeln!(file, "{}", process::id())
}

/// The temp dir of this process.
pub(super) fn temp() -> PathBuf {
    env::temp_dir()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn deep() -> (tempfile::TempDir, DataDir) {
        let root = tempfile::tempdir().expect("a temp dir");
        let data = DataDir::lock(root.path().join("d".repeat(120))).expect("a data folder");
        (root, data)
    }

    #[test]
    fn a_short_path_keeps_its_socket_in_the_folder() {
        let root = tempfile::tempdir().expect("a temp dir");
        let data = DataDir::lock(root.path()).expect("a data folder");
        assert_eq!(
            data.socket(root.path()).expect("a socket"),
            data.path().join("redis.sock")
        );
    }

    #[test]
    fn a_long_path_has_its_socket_in_a_private_folder_that_the_next_start_finds_again() {
        let (root, data) = deep();
        let socket = data.socket(root.path()).expect("a socket");
        let folder = socket.parent().expect("a folder");
        assert_eq!(folder.parent(), Some(root.path()));
        assert_eq!(folder.metadata().expect("metadata").mode() & 0o777, 0o700);
        assert_eq!(data.socket(root.path()).expect("the same again"), socket);
    }

    #[test]
    fn a_socket_folder_that_others_may_enter_is_refused() {
        let (root, data) = deep();
        let socket = data.socket(root.path()).expect("a socket");
        let folder = socket.parent().expect("a folder");
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("chmod");
        let error = data
            .socket(root.path())
            .expect_err("open to others")
            .to_string();
        assert!(error.contains("it is open to other users"), "{error}");
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).expect("chmod");
        if chown(folder, Some(12345), None).is_ok() {
            let error = data.socket(root.path()).expect_err("not ours").to_string();
            assert!(
                error.contains("it belongs to another user (uid 12345)"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_folder_that_others_may_write_to_is_refused() {
        let root = tempfile::tempdir().expect("a temp dir");
        let lock_with = |mode| {
            fs::set_permissions(root.path(), fs::Permissions::from_mode(mode)).expect("chmod");
            DataDir::lock(root.path())
                .map(drop)
                .map_err(|error| error.to_string())
        };
        for mode in [0o777, 0o770, 0o702, 0o1777] {
            let error = lock_with(mode).expect_err("others may write");
            assert!(
                error.contains("other users may write to it (mode 7"),
                "{error}"
            );
        }
        lock_with(0o755).expect("they may only read");
        lock_with(0o700).expect("private");
        if chown(root.path(), Some(12345), None).is_ok() {
            let error = lock_with(0o700).expect_err("not ours");
            assert!(
                error.contains("it belongs to another user (uid 12345)"),
                "{error}"
            );
        }
    }

    #[test]
    fn links_in_the_folder_are_not_followed() {
        for name in [
            "lock",
            "taskd.db",
            "taskd.db-wal",
            "taskd.db-lock",
            "redis.pid",
            "redis.log",
            "redis.log.old",
            "redis.sock",
            "redis",
            "redis/appendonlydir",
            "redis/dump.rdb",
            "redis/appendonlydir/appendonly.aof.manifest",
            "of any name",
        ] {
            let root = tempfile::tempdir().expect("a temp dir");
            let outside = tempfile::tempdir().expect("a temp dir");
            let link = root.path().join("data").join(name);
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(link.parent().expect("a folder"))
                .expect("a folder");
            let victim = outside.path().join("victim");
            fs::write(&victim, "precious").expect("a file");
            symlink(&victim, &link).expect("a link");
            let error = DataDir::lock(root.path().join("data"))
                .map(drop)
                .expect_err("a link")
                .to_string();
            assert!(
                error.contains(&format!("{name} in it is a link")),
                "{error}"
            );
            assert_eq!(fs::read_to_string(&victim).expect("the file"), "precious");
            // A dangling link is refused as well, and the file that it names is not created.
            fs::remove_file(&victim).expect("removed");
            DataDir::lock(root.path().join("data"))
                .map(drop)
                .expect_err("a link");
            assert!(!victim.exists());
        }
    }

    #[test]
    fn a_temp_dir_that_is_too_long_itself_is_refused() {
        let (root, data) = deep();
        let error = data
            .socket(&root.path().join("t".repeat(120)))
            .expect_err("too long")
            .to_string();
        assert!(error.contains("longer than 107 bytes"), "{error}");
    }
}
