//! The calls that need no token and may stay open: health and reflection.

use axum::Router;
use http_body_util::BodyExt as _;
use hyper::{Request, Response};
use tonic::{Status, body::Body, service::Routes};

use crate::ingress::{
    net::body::Counted,
    net::connection::Handlers as _,
    net::staying::{OfConnection, OfProcess},
};

/// True for the call of a probe, which asks once.
pub(super) fn is_probe(path: &str) -> bool {
    path == "/grpc.health.v1.Health/Check"
}

/// The handlers of these calls, and the limits of open ones.
pub(super) struct Others {
    handlers: Router,
    staying: OfProcess,
}

impl Others {
    pub(super) fn new(handlers: Routes) -> Self {
        Self {
            handlers: handlers.into_axum_router(),
            staying: OfProcess::default(),
        }
    }

    /// Answers a call, which takes up a place until its answer ends.
    pub(super) async fn answer(&self, request: Request<Counted>) -> Response<Body> {
        let connection: &OfConnection = request
            .extensions()
            .get()
            .expect("each call that may stay has its connection");
        let place = match self
            .staying
            .admit(connection, is_probe(request.uri().path()))
        {
            Ok(place) => place,
            Err(why) => return Status::resource_exhausted(why).into_http(),
        };
        let answer = self.handlers.clone().answer(request).await;
        answer.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _taken = &place;
                frame
            }))
        })
    }
}
