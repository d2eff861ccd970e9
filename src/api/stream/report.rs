//! The reports of a worker's frame.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use super::frames::StreamEnd;
use crate::{
    api::{Api, Error},
    model::{Batch, Caller, FrameAnswer, ItemAnswer, ItemStatus, Items, WorkerFrame},
    pipelines::tasks::{self, Attached, Reports},
};

impl Api {
    /// Reports what a frame says, and answers it.
    pub(super) async fn report_frame(
        &self,
        caller: &Caller,
        attached: &Attached,
        frame: WorkerFrame,
        mut answer: FrameAnswer,
    ) -> Result<FrameAnswer, StreamEnd> {
        let WorkerFrame { completions, rejections, extensions, .. } = frame;
        let reports = Reports::of(&completions, &rejections, &extensions);
        if !completions.is_empty() {
            let ids = ids(&completions);
            let worker = attached.worker().to_owned();
            let answers = self.complete(caller, Batch { worker, items: completions }).await;
            answer.completions = answered(answers, ids).map_err(end)?;
            attached.completed(&reports, &answer.completions);
        }
        if !rejections.is_empty() {
            let ids = ids(&rejections);
            let worker = attached.worker().to_owned();
            let answers = self.reject(caller, Batch { worker, items: rejections }).await;
            answer.rejections = answered(answers, ids).map_err(end)?;
            attached.rejected(&reports, &answer.rejections);
        }
        if !extensions.is_empty() {
            let ids = ids(&extensions);
            let worker = attached.worker().to_owned();
            let answers = self.extend(caller, Batch { worker, items: extensions }).await;
            answer.extensions = answered(answers, ids).map_err(end)?;
            attached.extended(&reports, &answer.extensions);
        }
        Ok(answer)
    }
}

fn end(error: Error) -> StreamEnd {
    match error {
        Error::Denied(denied) => denied.into(),
        error => error.into(),
    }
}

pub(in crate::api) fn ids<T>(items: &Items<T>) -> Vec<String> {
    items.iter().map(|item| item.as_ref().map_or_else(|answer| answer.id.clone(), |item| item.id.clone())).collect()
}

/// The answers to items. Where a server does not answer, each is to be sent again: the session goes on.
pub(in crate::api) fn answered(
    answers: Result<Vec<ItemAnswer>, Error>,
    ids: Vec<String>,
) -> Result<Vec<ItemAnswer>, Error> {
    match answers {
        Err(error @ Error::Tasks(tasks::Error::Unavailable(_))) => {
            let why = error.to_string();
            let try_later = |id| ItemAnswer { error: why.clone(), ..ItemAnswer::new(id, ItemStatus::TryLater) };
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
