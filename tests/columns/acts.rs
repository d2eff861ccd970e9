//! The acts of operators over gRPC, page by page, and how many a list has. `access.rs` asks for
//! them over HTTP.

use serde_json::json;
use taskd::wire::pb::{ListActsRequest, operator_client::OperatorClient};
use tonic::{Code, Request};

use super::access::token;
use crate::column;

#[tokio::test]
async fn acts_are_listed_over_grpc_page_by_page() {
    let daemon = column::start("auth = \"tokens\"\n", &[]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let scoped = token(&daemon, "scoped", &["--roles", "admin", "--queues", "q"]).await;
    let client = OperatorClient::connect(daemon.grpc()).await.unwrap();
    let list = async |token: &str, before: &str, limit: u32| {
        let mut request = Request::new(ListActsRequest {
            before: before.into(),
            limit,
        });
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {token}").parse().unwrap());
        client
            .clone()
            .list_acts(request)
            .await
            .map(|answer| answer.into_inner().acts)
    };
    let all = list(&admin, "", 0).await.unwrap();
    let on: Vec<_> = all.iter().map(|act| act.on.as_str()).collect();
    assert_eq!(on.len(), 2, "{all:?}");
    assert!(
        on[0].contains("scoped") && on[1].contains("admin"),
        "the latest is the first: {all:?}"
    );
    assert!(
        all.iter()
            .all(|act| !act.who.is_empty() && !act.what.is_empty() && act.at.is_some()),
        "{all:?}"
    );
    let latest = list(&admin, "", 1).await.unwrap();
    assert_eq!(latest, all[..1]);
    assert_eq!(list(&admin, &latest[0].id, 1).await.unwrap(), all[1..]);
    assert_eq!(
        list(&admin, "x", 1).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    // They name queues and tokens of others.
    assert_eq!(
        list(&scoped, "", 1).await.unwrap_err().code(),
        Code::PermissionDenied
    );
}

#[tokio::test]
async fn a_list_of_acts_or_bulk_changes_has_as_many_as_asked() {
    let daemon = column::start("", &[]).await;
    for _ in 0..2 {
        assert_eq!(daemon.post("/v1/queues/q:pause", &json!({})).await.0, 200);
        assert_eq!(daemon.post("/v1/queues/q:resume", &json!({})).await.0, 200);
        let change = json!({"filter": {"queue": "q"}, "yes": true});
        assert_eq!(daemon.post("/v1/tasks:cancel", &change).await.0, 200);
    }
    for (list, all) in [("acts", 6), ("bulk", 2)] {
        for (limit, count) in [("0", all), ("", all), ("1", 1), ("1000", all)] {
            let query = if limit.is_empty() {
                String::new()
            } else {
                format!("?limit={limit}")
            };
            let (status, answer) = daemon.get(&format!("/v1/{list}{query}")).await;
            assert_eq!(
                (status, answer[list].as_array().map(Vec::len)),
                (200, Some(count)),
                "{list} {limit}: {answer}"
            );
        }
        let (status, answer) = daemon.get(&format!("/v1/{list}?before=")).await;
        assert_eq!(
            (status, answer[list].as_array().map(Vec::len)),
            (200, Some(all)),
            "{list}: {answer}"
        );
        let (status, answer) = daemon.get(&format!("/v1/{list}?limit=1001")).await;
        assert_eq!(
            (status, &answer["detail"]),
            (400, &json!("limit is 1001; must be 1 to 1000")),
            "{list}"
        );
    }
}
