//! Which addresses requests may reach.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    task::{Context, Poll},
    vec,
};

use futures::{FutureExt as _, future::BoxFuture};
use hyper_util::client::legacy::connect::dns::Name;
use tokio::net::lookup_host;
// hyper-util wants this trait of a resolver.
use tonic::codegen::Service;

use crate::config::CallHosts;

/// What a client may connect to. It resolves names itself, so that nothing lies between the check
/// of an address and its use.
#[derive(Clone, Debug)]
pub enum Reach {
    Anything,
    /// Public addresses, and those of hosts that are named.
    Public(Arc<CallHosts>),
}

/// A host is only at addresses that may not be reached.
#[derive(Debug, thiserror::Error)]
#[error(
    "{host} is at the private address {address}; name it in workflow_call_allow to let workflows call it"
)]
pub(super) struct Refused {
    host: String,
    address: IpAddr,
}

impl Reach {
    /// Checks a host if it is an address.
    pub(super) fn check_literal(&self, host: &str) -> Result<(), Refused> {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = host.parse::<IpAddr>().ok();
        let addresses = address.map(|address| SocketAddr::new(address, 0));
        self.allowed(host, addresses.into_iter().collect())
            .map(drop)
    }

    /// Those of the addresses of a host that may be reached.
    fn allowed(&self, host: &str, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Refused> {
        let allow = match self {
            Self::Anything => return Ok(addresses),
            Self::Public(allow) => allow,
        };
        if allow.names(host) {
            return Ok(addresses);
        }
        let first = addresses.first().map(SocketAddr::ip);
        let public: Vec<SocketAddr> = addresses
            .into_iter()
            .filter(|address| is_public(address.ip()))
            .collect();
        match first {
            Some(address) if public.is_empty() => Err(Refused {
                host: host.to_owned(),
                address,
            }),
            _ => Ok(public),
        }
    }
}

impl Service<Name> for Reach {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let reach = self.clone();
        async move {
            let found = lookup_host((name.as_str(), 0)).await?;
            let addresses = reach.allowed(name.as_str(), found.collect())?;
            match addresses.is_empty() {
                true => Err(io::Error::other("the name has no address").into()),
                false => Ok(addresses.into_iter()),
            }
        }
        .boxed()
    }
}

/// Whether an address is one of the internet, and not of this machine or of its networks.
fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = match (a, b, c) {
        // This network, carriers' networks, protocol assignments, benchmarks, reserved.
        (0 | 240..=255, ..) | (100, 64..=127, _) | (192, 0, 0) | (198, 18 | 19, _) => true,
        _ => false,
    };
    !(is_special
        || address.is_loopback()
        || address.is_private()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation())
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let embedded = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match segments {
        // Addresses that contain one of IPv4: compatible, translated, NAT64 and 6to4.
        [0, 0, 0, 0, 0 | 0xffff, 0, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            embedded(high, low)
        }
        [0x2002, high, low, ..] => embedded(high, low),
        // Local NAT64, discarded, Teredo, documentation.
        [0x64, 0xff9b, 1, ..] | [0x100, 0, 0, 0, ..] | [0x2001, 0 | 0xdb8, ..] => false,
        // Unique local, link-local and site-local, multicast.
        [first, ..] => {
            first & 0xfe00 != 0xfc00 && first & 0xff80 != 0xfe80 && first & 0xff00 != 0xff00
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_are_known() {
        let private = [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.0.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "172.16.0.1",
            "192.168.1.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::7f00:1",
            "64:ff9b::7f00:1",
            "::ffff:0:7f00:1",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            "2002:7f00:1::",
            "fc00::1",
            "fdab::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ];
        for address in private {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        let public = [
            "1.1.1.1",
            "100.63.0.1",
            "172.32.0.1",
            "198.20.0.1",
            "2606:4700::1111",
            "2a00:1450::1",
            "64:ff9b::101:101",
        ];
        for address in public {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn a_host_is_reached_at_its_public_addresses_unless_it_is_named() {
        let hosts = "shop.local, 127.0.0.1".parse().unwrap();
        let reach = Reach::Public(Arc::new(hosts));
        let addresses = |texts: &[&str]| -> Vec<SocketAddr> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        };
        let both = addresses(&["10.0.0.1:0", "1.1.1.1:0"]);
        let reached = reach.allowed("a.example", both.clone()).unwrap();
        assert_eq!(reached, addresses(&["1.1.1.1:0"]));
        assert_eq!(reach.allowed("shop.local", both.clone()).unwrap(), both);
        let refused = reach.allowed("a.example", addresses(&["10.0.0.1:0"]));
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("workflow_call_allow"), "{said}");
        assert!(reach.check_literal("127.0.0.1").is_ok());
        assert!(reach.check_literal("[::1]").is_err());
        assert!(reach.check_literal("a.example").is_ok());
    }
}
