use taskd_client::{Client, Done, Failure, Json, NewTask, Task, Worker};

#[tokio::main]
async fn main() -> Result<(), taskd_client::Error> {
    let client = Client::new("http://127.0.0.1:7601")?;
    Worker::new("rs-1", ["demo"]).concurrency(8).stop_on_signals().run(&client, work).await.map(drop)
}
async fn work(task: Task<Option<Json<Page>>>) -> Result<Done, Failure> {
    let depth = task.payload.as_ref().map_or(0, |page| page.depth);
    println!("{}", task.key());
    let child = |n| NewTask::new("demo", format!("{}/{n}", task.key())).json(&Page { depth: depth - 1 });
    let found = if depth > 0 { vec![child(0)?, child(1)?] } else { vec![] };
    Ok(Done::text("done").discover(found))
}
#[derive(serde::Deserialize, serde::Serialize)]
struct Page {
    depth: u32,
}
