//! The network layer, below all protocols: `listener` accepts clients, `tls` encrypts, `connection`
//! serves one of them. `standing` knows whose connection it is; `socket` and `delivery` follow an
//! answer until it is written. `body`, `lines`, `messages`, `budget` and `staying` limit what a
//! request may take.

pub(super) mod body;
pub(super) mod budget;
pub(super) mod connection;
pub(super) mod delivery;
pub(super) mod descriptors;
pub mod lines;
pub(super) mod listener;
pub(super) mod messages;
pub(super) mod socket;
pub(super) mod standing;
pub(super) mod staying;
pub(super) mod tls;
