//! `StreamTasks`: the frames of a session. Until the connection has written it, each frame holds
//! its memory of the budget, and each frame with tasks also its leases.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures::{Stream, StreamExt};
use parking_lot::Mutex;
use taskd_proto::codec;
use tokio::sync::{mpsc, oneshot};
use tonic::{Code, Request, Response, Status, Streaming};

use crate::{
    api::{OutgoingFrame, ReceivedFrame, ReserveBytes, StreamEnd},
    ingress::{
        State,
        net::{budget::Share, delivery::Loading},
    },
    model::Caller,
    wire::pb,
};

/// How many frames to the worker may wait for the connection.
const WAITING: usize = 8;

/// Serves a stream, in a task of its own, so that frames of a client that is slow to read are read
/// all the same.
pub(super) fn serve(
    state: &State,
    request: Request<Streaming<pb::WorkerFrame>>,
) -> Result<Response<Frames>, Status> {
    let (_, mut extensions, frames) = request.into_parts();
    let caller: Caller = extensions.remove().expect("each call was authenticated");
    let share: Share = extensions.remove().expect("each request has a share");
    let (out, sent) = mpsc::channel(WAITING);
    let (say_end, end) = oneshot::channel();
    let (api, budget) = (Arc::clone(&state.api), state.budget.clone());
    let access = caller.access.clone();
    let reserve: ReserveBytes = Arc::new(move |bytes| match budget.answer(&access, bytes) {
        Ok(permit) => Ok(Box::new(permit) as _),
        Err(error) => Err(error.to_string()),
    });
    let broken = Arc::<Mutex<Option<Status>>>::default();
    let why = Arc::clone(&broken);
    let frames = frames.map(move |frame| match frame {
        Ok(frame) => Ok(ReceivedFrame {
            frame: frame.into(),
            permit: Box::new(share.part()),
        }),
        Err(status) => {
            *broken.lock() = Some(status);
            Err(())
        }
    });
    let served = async move {
        let status = api
            .stream(caller, frames, out, reserve)
            .await
            .map_err(|end| match (end, why.lock().take()) {
                (StreamEnd::Broken, Some(status)) => status,
                (end, _) => end.into(),
            });
        // A client that has gone does not get it.
        drop(say_end.send(status));
    };
    let inspector = codec::inspector().expect("each call is inspected");
    state
        .api
        .spawn_stream(codec::inspected(inspector, served))?;
    let loading = Loading::default();
    let mut response = Response::new(Frames {
        sent,
        end: Some(end),
        loading: loading.clone(),
    });
    response.extensions_mut().insert(loading);
    Ok(response)
}

/// The frames on their way to the worker; after the last one, how the stream ended.
pub(in crate::ingress) struct Frames {
    sent: mpsc::Receiver<Box<OutgoingFrame>>,
    end: Option<oneshot::Receiver<Result<(), Status>>>,
    loading: Loading,
}

impl Stream for Frames {
    type Item = Result<pb::TaskdFrame, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(sent) = ready!(self.sent.poll_recv(cx)) {
            let OutgoingFrame {
                frame,
                deliveries,
                permit,
                ..
            } = *sent;
            // The encoder takes the frame now, and the next piece of the body contains it.
            self.loading.load(deliveries, permit);
            return Poll::Ready(Some(Ok(frame.into())));
        }
        let Some(end) = &mut self.end else {
            return Poll::Ready(None);
        };
        let end = ready!(Pin::new(end).poll(cx));
        self.end = None;
        match end {
            Ok(Ok(())) => Poll::Ready(None),
            Ok(Err(status)) => Poll::Ready(Some(Err(status))),
            Err(_) => Poll::Ready(Some(Err(Status::internal(
                "the stream ended without a word",
            )))),
        }
    }
}

impl From<StreamEnd> for Status {
    fn from(end: StreamEnd) -> Self {
        let why = end.to_string();
        match end {
            StreamEnd::Wrong(_) => Self::invalid_argument(why),
            StreamEnd::Refused(error) => error.into(),
            StreamEnd::Silent(_) => Self::deadline_exceeded(why),
            // The worker has closed its side, which is not an error.
            StreamEnd::HalfClosed => Self::new(Code::Ok, ""),
            StreamEnd::Stopping => Self::unavailable(why),
            StreamEnd::TakenOver | StreamEnd::Displaced => Self::aborted(why),
            StreamEnd::Broken => Self::new(Code::Cancelled, why),
        }
    }
}
