//! The errors of this crate.

use tonic::{Code, Status};

/// Why something did not work.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The address of a server, the token or the certificates are of no use.
    #[error("{0}")]
    Options(String),
    /// taskd refused a call. The same call would be refused again.
    #[error("{message}")]
    Refused {
        /// gRPC's code.
        code: Code,
        /// The words of taskd.
        message: String,
    },
    /// taskd did not answer, or asked to try later.
    #[error("taskd at {address}: {message}")]
    Away {
        /// The server that was asked last.
        address: String,
        /// Its last words, or those of the connection.
        message: String,
    },
}

impl Error {
    /// True if the same call may succeed later.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Away { .. })
    }

    /// True if the server does not know the call: it is older than this crate.
    pub(crate) fn is_unimplemented(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                code: Code::Unimplemented,
                ..
            }
        )
    }

    pub(crate) fn of(status: &Status, address: &str) -> Self {
        let message = match status.message() {
            // tonic says no more of a server that cannot be reached, or does not speak gRPC.
            vague @ ("transport error" | "tcp connect error") => {
                format!("{vague}; is taskd's gRPC port there?")
            }
            message => message.to_owned(),
        };
        match may_pass(status) {
            true => Self::Away {
                address: address.to_owned(),
                message,
            },
            false => Self::Refused {
                code: status.code(),
                message,
            },
        }
    }

    /// True if the items of the call are the reason, not the caller.
    pub(crate) fn is_of_items(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                code: Code::InvalidArgument | Code::OutOfRange,
                ..
            }
        )
    }
}

/// True if a call may succeed later: taskd is busy or away. A broken connection shows as one of
/// several codes.
fn may_pass(status: &Status) -> bool {
    !matches!(
        status.code(),
        Code::InvalidArgument
            | Code::Unimplemented
            | Code::OutOfRange
            | Code::NotFound
            | Code::PermissionDenied
            | Code::Unauthenticated
    )
}
