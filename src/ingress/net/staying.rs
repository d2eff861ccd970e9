//! Limits the calls that need no token and may stay open: gRPC's health and reflection.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most open calls of one connection, and of the process. Each takes about 16 KiB.
const OF_CONNECTION: usize = 10;
const OF_PROCESS: usize = 1000;

/// The open calls of one connection. Cheap to clone.
#[derive(Clone)]
pub(in crate::ingress) struct OfConnection(Arc<Semaphore>);

impl Default for OfConnection {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(OF_CONNECTION)))
    }
}

/// The open calls of the process.
pub(in crate::ingress) struct OfProcess(Arc<Semaphore>);

impl Default for OfProcess {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(OF_PROCESS)))
    }
}

/// The place of an open call. Dropping it frees the place.
pub(in crate::ingress) struct Place {
    _of_connection: OwnedSemaphorePermit,
    _of_process: Option<OwnedSemaphorePermit>,
}

impl OfProcess {
    /// Admits a call, or returns why not. A probe takes no place of the process, because streams
    /// must not make it fail.
    pub(in crate::ingress) fn admit(
        &self,
        connection: &OfConnection,
        is_probe: bool,
    ) -> Result<Place, String> {
        let take = |places: &Arc<Semaphore>, most, of| {
            let place = Arc::clone(places).try_acquire_owned();
            place
                .map_err(|_| format!("{most} calls without a token are open {of}; try again later"))
        };
        let of_connection = take(&connection.0, OF_CONNECTION, "on this connection")?;
        let of_process = (!is_probe)
            .then(|| take(&self.0, OF_PROCESS, "here"))
            .transpose()?;
        Ok(Place {
            _of_connection: of_connection,
            _of_process: of_process,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_and_the_process_have_so_many_open_calls() {
        let (process, one) = (OfProcess::default(), OfConnection::default());
        let mut open: Vec<Place> = (0..OF_CONNECTION)
            .map(|_| process.admit(&one, false).unwrap())
            .collect();
        let why = process.admit(&one, true).err().unwrap();
        assert_eq!(
            why,
            "10 calls without a token are open on this connection; try again later"
        );
        let connections: Vec<OfConnection> = (1..OF_PROCESS / OF_CONNECTION)
            .map(|_| OfConnection::default())
            .collect();
        open.extend(
            connections
                .iter()
                .flat_map(|one| (0..OF_CONNECTION).map(|_| process.admit(one, false).unwrap())),
        );
        let another = OfConnection::default();
        assert!(
            process
                .admit(&another, false)
                .err()
                .unwrap()
                .contains("1000 calls without a token are open here")
        );
        process.admit(&another, true).unwrap();
        open.pop();
        process.admit(&another, false).unwrap();
    }
}
