//! The reports of a worker's frame.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use super::frames::StreamEnd;
use crate::{
    api::{Api, Error},
    model::{Batch, Caller, FrameAnswer, Item, ItemAnswer, ItemStatus, Items, WorkerFrame},
    pipelines::tasks::{self, Attached, Reports},
};

impl Api {
    /// Reports what a frame says, and answers it.
    pub(super) async fn report_frame(
        &self,
        caller: &Caller,
        attached: &Attached,
        frame: WorkerFrame,
        reports: Reports,
        mut answer: FrameAnswer,
    ) -> Result<FrameAnswer, StreamEnd> {
        let WorkerFrame {
            completions,
            rejections,
            extensions,
            ..
        } = frame;
        let worker = attached.worker();
        let completed = answers(worker, completions, async |batch| {
            self.complete(caller, batch).await
        });
        answer.completions = completed.await?;
        attached.completed(&reports, &answer.completions);
        let rejected = answers(worker, rejections, async |batch| {
            self.reject(caller, batch).await
        });
        answer.rejections = rejected.await?;
        attached.rejected(&reports, &answer.rejections);
        let extended = answers(worker, extensions, async |batch| {
            self.extend(caller, batch).await
        });
        answer.extensions = extended.await?;
        self.tasks()?
            .extended(attached, &reports, &answer.extensions)
            .await;
        Ok(answer)
    }
}

/// Reports items, if there are any. Where a server does not answer, each is to be sent again: the
/// session goes on.
pub(in crate::api) async fn answers<T>(
    worker: &str,
    items: Items<T>,
    call: impl AsyncFnOnce(Batch<T>) -> Result<Vec<ItemAnswer>, Error>,
) -> Result<Vec<ItemAnswer>, Error> {
    if items.is_empty() {
        return Ok(Vec::new());
    }
    let id = |item: &Result<Item<T>, ItemAnswer>| match item {
        Ok(item) => item.id.clone(),
        Err(answer) => answer.id.clone(),
    };
    let ids: Vec<String> = items.iter().map(id).collect();
    match call(Batch {
        worker: worker.to_owned(),
        items,
    })
    .await
    {
        Err(error @ Error::Tasks(tasks::Error::Unavailable(_))) => {
            let why = error.to_string();
            let try_later = |id| ItemAnswer {
                error: why.clone(),
                ..ItemAnswer::new(id, ItemStatus::TryLater)
            };
            Ok(ids.into_iter().map(try_later).collect())
        }
        answers => answers,
    }
}

/// The output of a future that is there; never, if it is not.
pub(super) struct OptionFuture<'a, F>(pub(super) &'a mut Option<Pin<Box<F>>>)
where
    F: Future + ?Sized;

impl<F: Future + ?Sized> Future for OptionFuture<'_, F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.0.as_mut() {
            Some(future) => future.as_mut().poll(cx).map(Some),
            None => Poll::Ready(None),
        }
    }
}
