//! Passes on the reports that a worker's frame carries: completions, rejections and extensions.

use super::frames::StreamEnd;
use crate::{
    api::{Api, Error},
    model::{Batch, Caller, FrameAnswer, Item, ItemAnswer, ItemStatus, Items, WorkerFrame},
    pipelines::tasks::{self, Attached, Reports},
};

impl Api {
    /// Carries out the reports of a frame, one kind after another, and adds their answers to
    /// `answer`.
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

/// Calls `call` with the items, if there are any.
///
/// If a server does not answer, each item is answered with `TRY_LATER` and the session goes on: the
/// worker sends the reports again.
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
