//! Opens a stream.

use std::time::Duration;

use tokio::sync::mpsc;
use tonic::{Status, Streaming, codegen::tokio_stream::wrappers::ReceiverStream};

use crate::{
    address::{LARGEST_ANSWER, Taskd},
    pb::{self, tasks_client::TasksClient},
};

/// The timeout for opening a stream, including the connection.
pub(super) const OPEN_WITHIN: Duration = Duration::from_secs(10);
/// The number of frames that may wait for the connection.
const WAITING: usize = 4;

/// A stream with an open session.
pub(super) struct Open {
    pub(super) to: mpsc::Sender<pb::WorkerFrame>,
    pub(super) from: Streaming<pb::TaskdFrame>,
    pub(super) opened: pb::SessionOpened,
    /// The rest of taskd's first frame.
    pub(super) first: pb::TaskdFrame,
}

pub(super) async fn open(taskd: Taskd, open: pb::OpenSession) -> Result<Open, Status> {
    let (to, frames) = mpsc::channel(WAITING);
    let frame = pb::WorkerFrame {
        open: Some(open),
        ..Default::default()
    };
    to.send(frame)
        .await
        .map_err(|_| Status::unavailable("the stream is closed"))?;
    let mut client = TasksClient::new(taskd).max_decoding_message_size(LARGEST_ANSWER);
    let mut from = client
        .stream_tasks(ReceiverStream::new(frames))
        .await?
        .into_inner();
    let first = from
        .message()
        .await?
        .ok_or_else(|| Status::unavailable("the stream ended at once"))?;
    let pb::TaskdFrame {
        opened: Some(opened),
        ..
    } = first
    else {
        return Err(Status::internal("the first frame does not say opened"));
    };
    Ok(Open {
        to,
        from,
        opened,
        first: pb::TaskdFrame {
            opened: None,
            ..first
        },
    })
}
