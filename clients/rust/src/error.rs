//! The errors of this crate.

use tonic::{Code, Status};

/// Why a call or a run failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The address of a server, the token or the certificates are invalid.
    #[error("{0}")]
    Options(String),
    /// taskd refused a call, and would refuse the same call again.
    #[error("{message}")]
    Refused {
        /// The gRPC code.
        code: Code,
        /// taskd's message.
        message: String,
    },
    /// taskd did not answer, or asked to try again later.
    #[error("taskd at {address}: {message}")]
    Away {
        /// The server that was called last.
        address: String,
        /// Its last message, or that of the connection.
        message: String,
    },
}

impl Error {
    /// True if the same call may succeed later.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Away { .. })
    }

    /// True if the server does not implement the call, because it is older than this crate.
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
            // tonic gives no details if a server cannot be reached or does not speak gRPC.
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

    /// True if the items of the call caused the error, rather than the caller.
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

/// True if a call may succeed later, because taskd is busy or unavailable. A broken connection can
/// show up as any of several codes.
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
