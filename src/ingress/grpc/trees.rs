//! The service `Trees`: a task, its root, and all that is discovered from it.

use std::pin::Pin;

use futures::{Stream, stream};
use tonic::{Request, Response, Status};

use super::{Service, open, watch::status};
use crate::{
    api::NextOfTree,
    wire::{
        pb::{self, trees_server::Trees},
        tree_wait,
    },
};

/// The states of a tree that a watcher gets.
type Watched = Pin<Box<dyn Stream<Item = Result<pb::Tree, Status>> + Send>>;

#[tonic::async_trait]
impl Trees for Service {
    async fn list_trees(
        &self,
        request: Request<pb::ListTreesRequest>,
    ) -> Result<Response<pb::ListTreesResponse>, Status> {
        let (caller, request) = open(request);
        let list = self.0.api.trees(&caller, request.try_into()).await?;
        self.within(&caller, list.into())
    }

    async fn get_tree(
        &self,
        request: Request<pb::GetTreeRequest>,
    ) -> Result<Response<pb::Tree>, Status> {
        let (caller, request) = open(request);
        let wait = tree_wait(&request).map_err(Status::invalid_argument)?;
        let tree = self.0.api.tree(&caller, &request.id, wait).await?;
        self.within(&caller, tree.into())
    }

    type WatchTreeStream = Watched;

    async fn watch_tree(
        &self,
        request: Request<pb::WatchTreeRequest>,
    ) -> Result<Response<Watched>, Status> {
        let (caller, request) = open(request);
        let watching = self.0.api.watch_tree(&caller, &request.id).await?;
        let trees = stream::unfold(watching, async |mut watching| {
            loop {
                match watching.next().await? {
                    NextOfTree::Tree(tree) => return Some((Ok((*tree).into()), watching)),
                    // HTTP/2 has its own pings.
                    NextOfTree::Beat => {}
                    NextOfTree::End(end) => return Some((Err(status(end)), watching)),
                    NextOfTree::Removed => {
                        let why = "the tree is not kept any more";
                        return Some((Err(Status::not_found(why)), watching));
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(trees)))
    }

    async fn cancel_tree(
        &self,
        request: Request<pb::CancelTreeRequest>,
    ) -> Result<Response<pb::BulkChange>, Status> {
        let (caller, request) = open(request);
        let bulk = self.0.api.cancel_tree(&caller, &request.id).await?;
        Ok(Response::new(bulk.into()))
    }

    async fn retry_tree(
        &self,
        request: Request<pb::RetryTreeRequest>,
    ) -> Result<Response<pb::BulkChange>, Status> {
        let (caller, request) = open(request);
        let bulk = self.0.api.retry_tree(&caller, &request.id).await?;
        Ok(Response::new(bulk.into()))
    }
}
