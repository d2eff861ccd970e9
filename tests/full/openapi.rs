//! Every operation, called by programs that know nothing but `/openapi.json`: a generated client,
//! and schemathesis with values that the document allows and with others.

use crate::{columns::access::token, support::daemon::Daemon};

#[tokio::test]
async fn the_document_is_true_for_every_operation() {
    // A call may not wait for long: thousands are made, and some of them ask for it.
    let mut daemon = Daemon::start("auth = \"tokens\"\nmax_wait = \"100ms\"\n", &[]).await;
    let token = token(&daemon, "openapi", &["--roles", "admin"]).await;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/check-openapi");
    let checked = tokio::process::Command::new(script)
        .args([&daemon.http(), &token])
        .output()
        .await
        .unwrap();
    let said = [checked.stdout, checked.stderr]
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .concat();
    assert!(checked.status.success(), "{said}");
    assert!(daemon.stop().await.success());
}
