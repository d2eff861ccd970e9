#[tokio::main]
async fn main() -> Result<(), taskd_client::Error> {
    let client = taskd_client::Client::new("http://127.0.0.1:7601")?;
    taskd_client::Worker::new("rs-1", ["demo"]).concurrency(8).stop_on_signals().run(&client, work).await.map(drop)
}
async fn work(task: taskd_client::Task<String>) -> Result<(), taskd_client::Failure> {
    println!("{}: {}", task.key(), task.payload);
    Ok(())
}
