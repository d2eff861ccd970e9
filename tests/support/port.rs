//! TCP ports that are reserved for one test, across all test processes on this machine.

use std::{
    fs::{File, create_dir_all},
    net::TcpListener,
    ops::Range,
};

/// A port that belongs to the test until this is dropped, even while nothing listens on it.
pub(crate) struct Port {
    pub(crate) number: u16,
    _lock: File,
}

impl Port {
    /// Reserves a random port in `range`. The range should lie below the ports that the system
    /// assigns to outgoing connections (from 32,768), so that a killed server can come back on the
    /// same port. `scripts/free-port` uses the ports from 20,000 on.
    pub(crate) fn reserve(range: Range<u16>) -> Self {
        let span = u128::from(range.end - range.start);
        let random = || range.start + (uuid::Uuid::new_v4().as_u128() % span) as u16;
        std::iter::repeat_with(random)
            .take(1000)
            .find_map(Self::lock)
            .expect("one of a thousand ports is free")
    }

    fn lock(number: u16) -> Option<Self> {
        let locks = std::env::temp_dir().join("taskd-test-ports");
        create_dir_all(&locks).expect("a folder for the locks");
        let lock = File::create(locks.join(number.to_string())).expect("a lock file");
        lock.try_lock().ok()?;
        TcpListener::bind(("127.0.0.1", number))
            .is_ok()
            .then_some(Self {
                number,
                _lock: lock,
            })
    }
}
