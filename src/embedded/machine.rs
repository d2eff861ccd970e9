//! The memory for the embedded redis-server.

use std::{fs, path::Path};

/// Returns half of the memory of this machine or container, which is the default limit. `None` if
/// the kernel does not report it.
///
/// SQLite and taskd use the other half, and so do the pages that fork copies while redis-server
/// rewrites its append-only file.
pub(super) fn half_of_memory() -> Option<u64> {
    let total = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| total(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = groups
        .lines()
        .filter_map(|line| limit_of(line, |path| fs::read_to_string(path).ok()));
    total.into_iter().chain(limits).min().map(|bytes| bytes / 2)
}

/// The memory in `/proc/meminfo`, in bytes.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kib| kib << 10)
}

/// The lowest limit of a cgroup and its ancestors, given its line in `/proc/self/cgroup`: `0::/a/b`
/// in version 2, `4:memory:/a/b` in version 1.
fn limit_of(line: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let controllers = parts.next()?;
    let path = parts.next()?;
    let (root, file) = match controllers {
        "" => ("/sys/fs/cgroup", "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let path = Path::new(path.trim_start_matches('/'));
    // In a container the path may be the host's; then only the root exists.
    let limit = |group: &Path| {
        read(&Path::new(root).join(group).join(file))?
            .trim()
            .parse()
            .ok()
    };
    path.ancestors().filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_says_what_it_has() {
        assert_eq!(
            total("MemTotal:       24560136 kB\nMemFree: 1 kB\n"),
            Some(24_560_136 << 10)
        );
        assert_eq!(total("MemFree: 1 kB\n"), None);
        assert!(half_of_memory().is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn the_lowest_limit_of_the_groups_counts() {
        let read = |path: &Path| {
            let text = match path.to_str()? {
                "/sys/fs/cgroup/a/b/memory.max" => "max\n",
                "/sys/fs/cgroup/a/memory.max" => "2000\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes" => "3000\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(limit_of("0::/a/b", read), Some(2000));
        assert_eq!(limit_of("4:cpu,memory:/of/outside", read), Some(3000));
        assert_eq!(limit_of("5:cpu:/a", read), None);
        assert_eq!(limit_of("0::/", read), None);
    }
}
