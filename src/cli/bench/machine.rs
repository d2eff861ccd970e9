//! The machine and the resource usage of its processes, from /proc.

use std::{
    fs::{self, File},
    io::Write,
    net::SocketAddr,
    path::Path,
    time::Instant,
};

use nix::sys::{
    resource::{UsageWho, getrusage},
    statfs::{TMPFS_MAGIC, statfs},
    time::TimeValLike,
};
use serde::Serialize;

/// The machine that the figures depend on.
#[derive(Clone, Serialize)]
pub(super) struct Machine {
    cores: usize,
    cpu: String,
    kernel: String,
    /// The median time of a 4 KiB write with fdatasync in the data folder.
    fdatasync_us: Option<f64>,
    /// The data folder is in memory, where fsync is free.
    in_memory: bool,
}

impl Machine {
    /// `folder` is where the data is, if it is on this machine.
    pub(super) fn look(folder: Option<&Path>) -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpu
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            cpu: model
                .map_or("unknown CPU", |(_, name)| name.trim())
                .to_owned(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            fdatasync_us: folder.and_then(fdatasync_us),
            in_memory: folder
                .and_then(|folder| statfs(folder).ok())
                .is_some_and(|fs| fs.filesystem_type() == TMPFS_MAGIC),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} cores ({}), Linux {}",
            self.cores, self.cpu, self.kernel
        )?;
        if let Some(micros) = self.fdatasync_us {
            write!(f, ", 4 KiB and fdatasync {micros:.0} µs")?;
        }
        if self.in_memory {
            write!(
                f,
                "; the data is in memory, where fsync costs nothing: TMPDIR names another place"
            )?;
        }
        Ok(())
    }
}

fn fdatasync_us(folder: &Path) -> Option<f64> {
    let mut file = File::create(folder.join("fdatasync")).ok()?;
    let mut micros = Vec::new();
    for _ in 0..50 {
        let began = Instant::now();
        file.write_all(&[7; 4096])
            .and_then(|()| file.sync_data())
            .ok()?;
        micros.push(began.elapsed().as_secs_f64() * 1e6);
    }
    micros.sort_unstable_by(f64::total_cmp);
    micros.get(micros.len() / 2).copied()
}

/// The CPU that this process has used, in seconds.
pub(super) fn own_cpu_seconds() -> Option<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Some(micros as f64 / 1e6)
}

/// The CPU that a process of this machine has used, in seconds.
pub(super) fn cpu_seconds(pid: u32) -> Option<f64> {
    /// In this file Linux always counts in hundredths of a second, whatever its timer frequency.
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain blanks. Of the fields after it, state is number 3,
    // utime number 14 and stime number 15.
    let (_, fields) = stat.rsplit_once(") ")?;
    let ticks = fields
        .split(' ')
        .skip(11)
        .take(2)
        .filter_map(|ticks| ticks.parse::<f64>().ok());
    Some(ticks.sum::<f64>() / TICKS_A_SECOND)
}

/// The resident memory of a process on this machine.
pub(super) fn resident_bytes(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"))?;
    Some(kib.parse::<f64>().ok()? * 1024.0)
}

/// The process on this machine that listens at one of the addresses, if this user is allowed to see
/// it.
pub(super) fn listener(addresses: &[SocketAddr]) -> Option<u32> {
    let own = fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let is_here = |address: &SocketAddr| {
        address.ip().is_loopback() || own.contains(&format!("-- {}\n", address.ip()))
    };
    let port = addresses.iter().find(|address| is_here(address))?.port();
    let link = format!("socket:[{}]", listening_inode(port)?);
    let processes = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut holders = processes.filter(|pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        files
            .into_iter()
            .any(|file| fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == link.as_str()))
    });
    holders.next()
}

/// The inode of the socket that listens on a port.
fn listening_inode(port: u16) -> Option<String> {
    const LISTEN: &str = "0A";
    let wanted = format!(":{port:04X}");
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
        .map(|table| fs::read_to_string(table).unwrap_or_default());
    // sl, local address, remote address, state, queues, timer, retransmits, uid, timeout, inode
    tables
        .iter()
        .flat_map(|table| table.lines())
        .find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_it = fields.get(1)?.ends_with(&wanted) && *fields.get(3)? == LISTEN;
            is_it
                .then(|| fields.get(9).map(ToString::to_string))
                .flatten()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_found_by_its_port() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        assert_eq!(super::listener(&[address]), Some(std::process::id()));
        assert_eq!(
            super::listener(&[([203, 0, 113, 1], address.port()).into()]),
            None,
            "not of this machine"
        );
    }

    #[test]
    fn cpu_and_memory_are_those_of_a_process() {
        assert!(cpu_seconds(std::process::id()).is_some() && own_cpu_seconds().is_some());
        assert!(resident_bytes(std::process::id()).is_some_and(|bytes| bytes > 1e6));
        assert_eq!(
            (cpu_seconds(u32::MAX), resident_bytes(u32::MAX)),
            (None, None)
        );
    }
}
