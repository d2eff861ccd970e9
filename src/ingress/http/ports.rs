//! The ports of a process, which its answer to `GET /` names: the commands of taskd know one
//! address, and find the port of gRPC by it.

use axum::http::{HeaderMap, HeaderName, HeaderValue};

const HEADER: HeaderName = HeaderName::from_static("taskd-ports");

/// The ports on which a process listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    pub http: u16,
    pub grpc: u16,
}

impl Ports {
    /// The header of an answer: `taskd-ports: 7600 7601`.
    pub(super) fn header(self) -> [(HeaderName, HeaderValue); 1] {
        let value = HeaderValue::try_from(format!("{} {}", self.http, self.grpc));
        [(HEADER, value.expect("numbers may stand in a header"))]
    }

    /// The ports that an answer names. `None`: it is none of taskd.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let (http, grpc) = headers.get(HEADER)?.to_str().ok()?.split_once(' ')?;
        Some(Self {
            http: http.parse().ok()?,
            grpc: grpc.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_as_they_were_written() {
        let ports = Ports {
            http: 7600,
            grpc: 17601,
        };
        let headers = HeaderMap::from_iter(ports.header());
        assert_eq!(Ports::of(&headers), Some(ports));
        assert_eq!(Ports::of(&HeaderMap::new()), None);
    }
}
