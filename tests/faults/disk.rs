//! Small disks that can be filled: a tmpfs mounted for the files of one server. Needs root.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{fault::Which, world::World};

/// A mounted disk. Dropping it unmounts it.
pub(crate) struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Returns `None` if mounting is not permitted.
    pub(crate) fn mount(at: &Path, size: &str) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(at)
            .output();
        mounted
            .is_ok_and(|output| output.status.success())
            .then(|| Self(at.to_owned()))
    }

    pub(crate) fn at(&self) -> &Path {
        &self.0
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Unmount lazily, because the server may still be shutting down.
        Command::new("umount")
            .arg("--lazy")
            .arg(&self.0)
            .status()
            .ok();
    }
}

fn folder(world: &World<'_>, which: Which) -> Option<PathBuf> {
    match which {
        Which::Redis => Some(world.servers.redis.dir().to_owned()),
        Which::Sql => Some(world.servers.sql.dir().to_owned()),
        Which::Kafka(_) => None,
    }
}

/// True if the server's files are on a small disk.
pub(crate) fn is_small(world: &World<'_>, which: Which) -> bool {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    folder(world, which)
        .is_some_and(|folder| mounts.contains(&format!(" {} tmpfs ", folder.display())))
}

pub(crate) fn fill(world: &World<'_>, which: Which) {
    let ballast = folder(world, which).expect("it has one").join("ballast");
    // dd fails when the disk is full, as intended.
    Command::new("dd")
        .arg("if=/dev/zero")
        .arg(format!("of={}", ballast.display()))
        .args(["bs=64k"])
        .output()
        .unwrap();
}

/// Frees the disk, and restarts the server in case it has crashed, as an operator would.
pub(crate) fn empty(world: &mut World<'_>, which: Which) {
    fs::remove_file(folder(world, which).expect("it has one").join("ballast")).unwrap();
    world.server(which).start();
}
