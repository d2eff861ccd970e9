//! The service `Operator`: books, fsck, dead letters, acts, paused queues, limit keys, changes of
//! unfinished tasks, and bulk changes.

use tonic::{Request, Response, Status};

use super::{Service, open, results};
use crate::{
    model::{ChangeLetters, ChangeTasks, LetterPages, SetLimits},
    wire::{
        changes,
        pb::{self, operator_server::Operator},
        time::read_duration,
    },
};

#[tonic::async_trait]
impl Operator for Service {
    async fn get_books(
        &self,
        request: Request<pb::GetBooksRequest>,
    ) -> Result<Response<pb::Books>, Status> {
        let (caller, request) = open(request);
        self.within(
            &caller,
            self.0.api.books(&caller, &request.queue).await?.into(),
        )
    }

    async fn get_queue(
        &self,
        request: Request<pb::GetQueueRequest>,
    ) -> Result<Response<pb::Queue>, Status> {
        let (caller, request) = open(request);
        let wait = request
            .wait_drained
            .map(|wait| read_duration("wait_drained", wait))
            .transpose()
            .map_err(Status::invalid_argument)?;
        let queue = self.0.api.queue(&caller, &request.queue, wait).await?;
        self.within(&caller, queue.into())
    }

    async fn list_workers(
        &self,
        request: Request<pb::ListWorkersRequest>,
    ) -> Result<Response<pb::ListWorkersResponse>, Status> {
        let (caller, request) = open(request);
        let workers = self.0.api.workers(&caller, &request.queue).await?;
        self.within(&caller, workers.into())
    }

    async fn list_processes(
        &self,
        request: Request<pb::ListProcessesRequest>,
    ) -> Result<Response<pb::ListProcessesResponse>, Status> {
        let (caller, _) = open(request);
        let processes = results(self.0.api.processes(&caller).await?);
        self.within(&caller, pb::ListProcessesResponse { processes })
    }

    async fn retry_tasks(
        &self,
        request: Request<pb::RetryTasksRequest>,
    ) -> Result<Response<pb::RetryTasksResponse>, Status> {
        let (caller, request) = open(request);
        let changed = self
            .0
            .api
            .retry_tasks(&caller, ChangeTasks::try_from(request))
            .await?;
        Ok(Response::new(changed.into()))
    }

    async fn list_bulk_changes(
        &self,
        request: Request<pb::ListBulkChangesRequest>,
    ) -> Result<Response<pb::ListBulkChangesResponse>, Status> {
        let (caller, pb::ListBulkChangesRequest { limit, before }) = open(request);
        let bulk_changes = self
            .0
            .api
            .bulk_changes(&caller, Some(&before), limit)
            .await?;
        self.within(
            &caller,
            pb::ListBulkChangesResponse {
                bulk: results(bulk_changes),
            },
        )
    }

    async fn get_bulk_change(
        &self,
        request: Request<pb::GetBulkChangeRequest>,
    ) -> Result<Response<pb::BulkChange>, Status> {
        let (caller, request) = open(request);
        Ok(Response::new(
            self.0.api.bulk_change(&caller, &request.id).await?.into(),
        ))
    }

    async fn stop_bulk_change(
        &self,
        request: Request<pb::StopBulkChangeRequest>,
    ) -> Result<Response<pb::BulkChange>, Status> {
        let (caller, request) = open(request);
        Ok(Response::new(
            self.0
                .api
                .stop_bulk_change(&caller, &request.id)
                .await?
                .into(),
        ))
    }

    async fn fsck(
        &self,
        request: Request<pb::FsckRequest>,
    ) -> Result<Response<pb::FsckResponse>, Status> {
        let (caller, request) = open(request);
        self.within(
            &caller,
            self.0.api.fsck(&caller, request.into()).await?.into(),
        )
    }

    async fn list_dead_letters(
        &self,
        request: Request<pb::ListDeadLettersRequest>,
    ) -> Result<Response<pb::ListDeadLettersResponse>, Status> {
        let (caller, request) = open(request);
        self.within(
            &caller,
            self.0
                .api
                .letters(&caller, LetterPages::try_from(request))
                .await?
                .into(),
        )
    }

    async fn count_dead_letters(
        &self,
        request: Request<pb::CountDeadLettersRequest>,
    ) -> Result<Response<pb::CountDeadLettersResponse>, Status> {
        let (caller, request) = open(request);
        let pages = LetterPages::try_from(request);
        let reasons = self.0.api.letter_reasons(&caller, pages).await?;
        self.within(&caller, reasons.into())
    }

    async fn get_dead_letter(
        &self,
        request: Request<pb::GetDeadLetterRequest>,
    ) -> Result<Response<pb::Letter>, Status> {
        let (caller, request) = open(request);
        self.within(
            &caller,
            self.0.api.letter(&caller, &request.id).await?.into(),
        )
    }

    async fn retry_dead_letters(
        &self,
        request: Request<pb::ChangeDeadLettersRequest>,
    ) -> Result<Response<pb::ChangeDeadLettersResponse>, Status> {
        let (caller, request) = open(request);
        let changed = self
            .0
            .api
            .retry_letters(&caller, ChangeLetters::try_from(request))
            .await?;
        Ok(Response::new(changed.into()))
    }

    async fn purge_dead_letters(
        &self,
        request: Request<pb::ChangeDeadLettersRequest>,
    ) -> Result<Response<pb::ChangeDeadLettersResponse>, Status> {
        let (caller, request) = open(request);
        let changed = self
            .0
            .api
            .purge_letters(&caller, ChangeLetters::try_from(request))
            .await?;
        Ok(Response::new(changed.into()))
    }

    async fn list_acts(
        &self,
        request: Request<pb::ListActsRequest>,
    ) -> Result<Response<pb::ListActsResponse>, Status> {
        let (caller, request) = open(request);
        let before = Some(&request.before[..]);
        self.within(
            &caller,
            pb::ListActsResponse {
                acts: results(self.0.api.acts(&caller, before, request.limit).await?),
            },
        )
    }

    async fn change_tasks(
        &self,
        request: Request<pb::ChangeTasksRequest>,
    ) -> Result<Response<pb::ChangeTasksResponse>, Status> {
        let (caller, request) = open(request);
        let (tasks, update) = changes::update(request);
        Ok(Response::new(
            self.0
                .api
                .update_tasks(&caller, tasks, update)
                .await?
                .into(),
        ))
    }

    async fn requeue_tasks(
        &self,
        request: Request<pb::RequeueTasksRequest>,
    ) -> Result<Response<pb::RequeueTasksResponse>, Status> {
        let (caller, request) = open(request);
        let (tasks, requeue) = changes::requeue(request);
        Ok(Response::new(
            self.0
                .api
                .requeue_tasks(&caller, tasks, requeue)
                .await?
                .into(),
        ))
    }

    async fn pause_queue(
        &self,
        request: Request<pb::PauseQueueRequest>,
    ) -> Result<Response<pb::PauseQueueResponse>, Status> {
        let (caller, request) = open(request);
        let changed = self.0.api.pause_queue(&caller, &request.queue).await?;
        Ok(Response::new(pb::PauseQueueResponse { changed }))
    }

    async fn resume_queue(
        &self,
        request: Request<pb::ResumeQueueRequest>,
    ) -> Result<Response<pb::ResumeQueueResponse>, Status> {
        let (caller, request) = open(request);
        let changed = self.0.api.resume_queue(&caller, &request.queue).await?;
        Ok(Response::new(pb::ResumeQueueResponse { changed }))
    }

    async fn list_limits(
        &self,
        request: Request<pb::ListLimitsRequest>,
    ) -> Result<Response<pb::ListLimitsResponse>, Status> {
        let (caller, request) = open(request);
        let page = self.0.api.limit_keys(&caller, &request.into()).await?;
        self.within(&caller, page.into())
    }

    async fn get_limit(
        &self,
        request: Request<pb::GetLimitRequest>,
    ) -> Result<Response<pb::LimitKey>, Status> {
        let (caller, request) = open(request);
        let api = &self.0.api;
        let key = api.limit_key(&caller, &request.queue, &request.limit_key);
        Ok(Response::new(key.await?.into()))
    }

    async fn set_limit(
        &self,
        request: Request<pb::SetLimitRequest>,
    ) -> Result<Response<pb::LimitKey>, Status> {
        let (caller, request) = open(request);
        let set = SetLimits::try_from(request).map_err(Status::invalid_argument)?;
        let key = self.0.api.set_limits(&caller, &set).await?;
        Ok(Response::new(key.into()))
    }

    async fn clear_limit(
        &self,
        request: Request<pb::ClearLimitRequest>,
    ) -> Result<Response<pb::ClearLimitResponse>, Status> {
        let (caller, request) = open(request);
        let api = &self.0.api;
        let cleared = api.clear_limits(&caller, &request.queue, &request.limit_key);
        let changed = cleared.await?.changed;
        Ok(Response::new(pb::ClearLimitResponse { changed }))
    }
}
