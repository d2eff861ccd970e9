//! The service `Topologies`: graphs of stages.

use tonic::{Request, Response, Status};

use super::{Service, open, results};
use crate::wire::pb::{self, topologies_server::Topologies};

#[tonic::async_trait]
impl Topologies for Service {
    async fn list_topologies(
        &self,
        request: Request<pb::ListTopologiesRequest>,
    ) -> Result<Response<pb::ListTopologiesResponse>, Status> {
        let (caller, _) = open(request);
        let topologies = results(self.0.api.topologies(&caller).await?);
        self.within(&caller, pb::ListTopologiesResponse { topologies })
    }

    async fn get_topology(
        &self,
        request: Request<pb::GetTopologyRequest>,
    ) -> Result<Response<pb::Topology>, Status> {
        let (caller, request) = open(request);
        let topology = self.0.api.topology(&caller, &request.name).await?;
        self.within(&caller, topology.into())
    }

    async fn apply_topology(
        &self,
        request: Request<pb::ApplyTopologyRequest>,
    ) -> Result<Response<pb::Topology>, Status> {
        let (caller, request) = open(request);
        let pb::ApplyTopologyRequest { name, text } = request;
        let topology = self.0.api.apply_topology(&caller, &name, &text).await?;
        Ok(Response::new(topology.into()))
    }

    async fn delete_topology(
        &self,
        request: Request<pb::DeleteTopologyRequest>,
    ) -> Result<Response<pb::DeleteTopologyResponse>, Status> {
        let (caller, request) = open(request);
        self.0.api.delete_topology(&caller, &request.name).await?;
        Ok(Response::new(pb::DeleteTopologyResponse {}))
    }
}
