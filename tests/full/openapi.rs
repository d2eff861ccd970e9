//! Every operation, called by programs that know nothing but `/openapi.json`: a generated client, and schemathesis with
//! values that the document allows and with others.

use std::process::Command;

use crate::support::daemon::Daemon;

/// A new token of an admin.
fn admin(daemon: &Daemon) -> String {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.env_clear().envs(own).args(["token", "create", "openapi", "--roles", "admin", "--data-dir"]);
    let output = command.arg(daemon.data()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[tokio::test]
async fn the_document_is_true_for_every_operation() {
    // A call may not wait for long: thousands are made, and some of them ask for it.
    let mut daemon = Daemon::start("auth = \"tokens\"\nmax_wait = \"100ms\"\n", &[]).await;
    let token = admin(&daemon);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/check-openapi");
    let checked = tokio::process::Command::new(script).args([&daemon.http(), &token]).output().await.unwrap();
    let said = [checked.stdout, checked.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(checked.status.success(), "{said}");
    assert!(daemon.stop().await.success());
}
