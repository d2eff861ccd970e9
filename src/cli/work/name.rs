//! The name of this worker, which no other worker of this machine has.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener},
    },
};

use anyhow::{Context as _, bail};
use sha2::{Digest as _, Sha256};

/// A name that is taken for as long as this lives. However the process ends, the kernel gives the
/// name back.
pub(super) struct Taken {
    _sockets: Vec<UnixListener>,
}

/// Takes the name for a worker of these queues. taskd knows workers by their names, so it would
/// take two of the same name for one, and credit a task with NUM above 1 only once for both.
///
/// The packages for Go, Python and TypeScript take the host's name in the same way.
pub(super) fn take(name: &str, queues: &[String]) -> anyhow::Result<Taken> {
    let mut queues: Vec<&String> = queues.iter().collect();
    queues.sort_unstable();
    queues.dedup();
    let mut sockets = Vec::new();
    for queue in queues {
        match UnixListener::bind_addr(&address(name, queue)?) {
            Ok(socket) => sockets.push(socket),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => bail!(
                "a worker {name} of queue {queue} runs on this machine already, and taskd would take both for one: \
                 give this one a name of its own, as in --name {name}-2"
            ),
            Err(error) => {
                return Err(error).context("cannot find out whether another worker has this name");
            }
        }
    }
    Ok(Taken { _sockets: sockets })
}

/// The address in Linux's abstract namespace. It is a hash: an address has at most 107 bytes.
fn address(name: &str, queue: &str) -> io::Result<SocketAddr> {
    let hash = Sha256::digest(format!("{name}\n{queue}"));
    let hex: String = hash[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    SocketAddr::from_abstract_name(format!("taskd-worker/{hex}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_once_for_a_queue_and_is_free_again_afterwards() {
        let name = format!("w-{}", std::process::id());
        let queues = |names: &[&str]| -> Vec<String> {
            names.iter().map(|name| (*name).to_owned()).collect()
        };
        let first = take(&name, &queues(&["a", "b", "a"])).unwrap();
        let why = take(&name, &queues(&["c", "b"])).err().unwrap().to_string();
        assert!(
            why.contains(&format!("worker {name} of queue b")) && why.contains("--name"),
            "{why}"
        );
        let other = take(&name, &queues(&["c"])).unwrap();
        drop(first);
        take(&name, &queues(&["a", "b"])).unwrap();
        drop(other);
    }
}
