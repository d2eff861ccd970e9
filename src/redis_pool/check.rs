//! Checks of a server: its version, its settings, the state of its cluster.

use redis::{InfoDict, aio::MultiplexedConnection};

use super::{
    address::{Address, CONNECT},
    error::Error,
};

/// Refuses a server that is not a node of a working cluster.
pub(super) async fn check_node(
    address: &Address,
    node: &redis::ConnectionInfo,
) -> Result<(), Error> {
    let mut conn = address.connect(node, Some(CONNECT)).await?;
    let info: InfoDict = redis::cmd("INFO")
        .arg("cluster")
        .query_async(&mut conn)
        .await?;
    if !is_node(&info) {
        return Err(Error::NotCluster);
    }
    check_state(&mut conn).await
}

pub(super) async fn check_state(conn: &mut MultiplexedConnection) -> Result<(), Error> {
    let state: InfoDict = redis::cmd("CLUSTER").arg("INFO").query_async(conn).await?;
    match state.get::<String>("cluster_state").unwrap_or_default() {
        state if state == "ok" => Ok(()),
        state => Err(Error::NotReady(state)),
    }
}

fn is_node(info: &InfoDict) -> bool {
    info.get::<String>("cluster_enabled").as_deref() == Some("1")
}

pub(super) fn check(info: &InfoDict, is_cluster: bool) -> Result<(), Error> {
    let version = version(info);
    let major: u32 = version
        .split('.')
        .next()
        .and_then(|part| part.parse().ok())
        .unwrap_or(0);
    if major < 7 {
        return Err(Error::TooOld { version });
    }
    if !is_cluster && is_node(info) {
        return Err(Error::IsCluster);
    }
    // Transient: the address may lead to the master soon.
    if !is_cluster && info.get::<String>("role").as_deref() == Some("slave") {
        return Err(Error::Replica);
    }
    match info.get("maxmemory_policy") {
        Some(policy) if policy != "noeviction" => Err(Error::Evicts { policy }),
        _ => Ok(()),
    }
}

/// The version of Redis. Valkey reports the one that it is compatible with, always 7.2.
pub(super) fn version(info: &InfoDict) -> String {
    info.get("redis_version")
        .unwrap_or_else(|| "of an unknown version".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_evicting_servers_are_refused() {
        let info = |version, policy| {
            let text = format!(
                "# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n# Memory\r\n\
                 maxmemory_policy:{policy}\r\n"
            );
            InfoDict::new(&text)
        };
        assert!(check(&info("7.0.0", "noeviction"), false).is_ok());
        assert!(check(&InfoDict::new("redis_version:10.1\r\n"), false).is_ok());
        let old = check(&info("6.2.14", "noeviction"), false)
            .unwrap_err()
            .to_string();
        assert_eq!(old, "redis 6.2.14 is too old; taskd needs 7.0 or newer");
        assert!(check(&InfoDict::new(""), false).is_err());
        assert!(matches!(
            check(&info("7.2.4", "allkeys-lru"), false),
            Err(Error::Evicts { .. })
        ));
        let node = InfoDict::new("redis_version:7.0.1\r\ncluster_enabled:1\r\n");
        assert!(matches!(check(&node, false), Err(Error::IsCluster)));
        assert!(check(&node, true).is_ok());
        let replica = check(
            &InfoDict::new("redis_version:7.0.1\r\nrole:slave\r\n"),
            false,
        )
        .unwrap_err();
        assert!(matches!(replica, Error::Replica) && replica.is_transient());
    }
}
