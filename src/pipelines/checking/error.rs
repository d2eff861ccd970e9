//! Why a check failed.

use crate::{bus, queue, store};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Queue(#[from] queue::Error),
    #[error(transparent)]
    Bus(#[from] bus::Error),
}
