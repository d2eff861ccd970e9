//! The messages of processes and scripts about sessions: leases that an operator or a deadline
//! ended, takeovers, and caps. They share a Redis channel with the wakes, and may get lost.

use std::sync::Arc;

use uuid::Uuid;

use crate::model::{TaskId, WorkerName};

/// A message about sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionNotice {
    /// An operator cancelled these tasks while workers held them.
    Cancelled(Arc<[TaskId]>),
    /// An operator or a deadline ended these leases, each named by its task and its grant.
    LeasesLost(Arc<[(TaskId, u64)]>),
    /// The session ends the earlier sessions of its worker.
    Takeover { worker: WorkerName, session: Uuid },
    /// Another process gets too little of this worker's cap: streams give back what they do not
    /// use.
    Allotment { worker: WorkerName },
}

impl SessionNotice {
    /// Reads `!` and ids, as `lua/cancel.lua` writes them; `?` and ids with grants, as
    /// `lua/lib/lost.lua` does; `~`, the session and the worker; or `%` and the worker. Returns
    /// `None` if it is a wake.
    pub(super) fn read(message: &[u8]) -> Option<Self> {
        let (kind, rest) = message.split_first()?;
        match kind {
            b'!' => Some(Self::Cancelled(
                rest.as_chunks::<16>()
                    .0
                    .iter()
                    .filter_map(|id| TaskId::from_slice(id))
                    .collect(),
            )),
            b'?' => Some(Self::LeasesLost(
                rest.as_chunks::<24>().0.iter().filter_map(lease).collect(),
            )),
            b'~' => {
                let (session, worker) = std::str::from_utf8(rest).ok()?.split_once(' ')?;
                Some(Self::Takeover {
                    worker: WorkerName::new(worker).ok()?,
                    session: session.parse().ok()?,
                })
            }
            b'%' => Some(Self::Allotment {
                worker: WorkerName::new(std::str::from_utf8(rest).ok()?).ok()?,
            }),
            _ => None,
        }
    }
}

fn lease(bytes: &[u8; 24]) -> Option<(TaskId, u64)> {
    let (id, grant) = bytes.split_first_chunk::<16>()?;
    Some((
        TaskId::from_slice(id)?,
        u64::from_be_bytes(grant.try_into().ok()?),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_read_and_a_wake_is_none() {
        let id = TaskId::new();
        let session = Uuid::new_v4();
        let worker = WorkerName::new("a worker").unwrap();
        let message = [&b"!"[..], id.as_bytes(), id.as_bytes(), b"rest"].concat();
        assert_eq!(
            SessionNotice::read(&message),
            Some(SessionNotice::Cancelled([id, id].into()))
        );
        let message = [&b"?"[..], id.as_bytes(), &[0, 0, 0, 0, 0, 0, 1, 2], b"rest"].concat();
        assert_eq!(
            SessionNotice::read(&message),
            Some(SessionNotice::LeasesLost([(id, 258)].into()))
        );
        let message = format!("~{session} {worker}");
        assert_eq!(
            SessionNotice::read(message.as_bytes()),
            Some(SessionNotice::Takeover {
                worker: worker.clone(),
                session
            })
        );
        assert_eq!(
            SessionNotice::read(b"%a worker"),
            Some(SessionNotice::Allotment { worker })
        );
        for message in [&b"crawl"[..], b"", b"~", b"~x y", b"~\xff", b"%"] {
            assert_eq!(SessionNotice::read(message), None, "{message:?}");
        }
    }
}
