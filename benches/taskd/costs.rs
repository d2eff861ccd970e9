//! The cost of access tokens, histories and traces: each compared with the same work without it, in
//! the same run.

use std::net::SocketAddr;

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
    trace_service_server::{TraceService, TraceServiceServer},
};
use tokio::{net::TcpListener, task::JoinHandle};
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

use crate::{
    command::{bench, rate_of},
    progress::Progress,
    report::{Row, Runs, Table, Unit},
    scale::Scale,
};

/// The same work twice, the second time with an additional feature.
struct Pair {
    name: &'static str,
    arguments: Vec<String>,
    without: Vec<String>,
    with: Vec<String>,
    /// The figures: their phases and measures.
    measures: &'static [(&'static str, &'static str)],
    figures: Vec<(Runs, Runs)>,
}

const BOTH: &[(&str, &str)] = &[("insert", "accepted"), ("process", "settled in SQL")];

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let collector = Collector::start().await?;
    let mut pairs = pairs(scale, &format!("http://{}", collector.address));
    for run in 1..=scale.runs {
        for pair in &mut pairs {
            progress.step(format!("costs, run {run} of {}: {}", scale.runs, pair.name));
            pair.measure().await?;
        }
    }
    let rows = pairs.into_iter().flat_map(Pair::rows).collect();
    Ok(vec![Table {
        bench: "costs",
        title: "costs: tokens, histories and traces",
        conditions: "embedded defaults; each figure beside a run without".to_owned(),
        references: vec!["without".to_owned()],
        rows,
    }])
}

fn pairs(scale: &Scale, collector: &str) -> Vec<Pair> {
    let (many, few) = (scale.tasks.to_string(), scale.single_tasks.to_string());
    let work = ["insert", "process", "--tasks", &many];
    // One task per call, so that the full cost of a call shows.
    let one_a_call = ["insert", "process", "--tasks", &few, "--batch", "1"];
    let traced = |sample: &str| {
        [
            "--set".to_owned(),
            endpoint(collector),
            "--set".to_owned(),
            sampled(sample),
        ]
    };
    vec![
        Pair::new(
            "a token with each call, 1 task a call",
            &one_a_call,
            &[],
            &strings(&["--with-token"]),
            BOTH,
        ),
        Pair::new(
            "a history, each task fails once",
            &["process", "--failing", "--tasks", &many],
            &strings(&["--set", "history=false"]),
            &[],
            &[("process", "settled in SQL")],
        ),
        Pair::new("traces, no task is sampled", &work, &[], &traced("0"), BOTH),
        Pair::new(
            "traces, one task in 100 is sampled",
            &work,
            &[],
            &traced("0.01"),
            BOTH,
        ),
        Pair::new(
            "traces, all tasks are sampled",
            &work,
            &[],
            &traced("1"),
            BOTH,
        ),
    ]
}

fn endpoint(collector: &str) -> String {
    format!("otlp_endpoint={collector}")
}

fn sampled(part: &str) -> String {
    format!("trace_sample={part}")
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

impl Pair {
    fn new(
        name: &'static str,
        arguments: &[&str],
        without: &[String],
        with: &[String],
        measures: &'static [(&'static str, &'static str)],
    ) -> Self {
        let figures = measures.iter().map(|_| Default::default()).collect();
        Self {
            name,
            arguments: strings(arguments),
            without: without.to_vec(),
            with: with.to_vec(),
            measures,
            figures,
        }
    }

    async fn measure(&mut self) -> anyhow::Result<()> {
        let mut reports = Vec::new();
        for beside in [&self.without, &self.with] {
            let arguments: Vec<&str> = self
                .arguments
                .iter()
                .chain(beside)
                .map(String::as_str)
                .collect();
            reports.push(bench(&arguments).await?);
        }
        for ((without, with), (phase, measure)) in self.figures.iter_mut().zip(self.measures) {
            without.push(rate_of(&reports[0], phase, measure)?);
            with.push(rate_of(&reports[1], phase, measure)?);
        }
        Ok(())
    }

    fn rows(self) -> impl Iterator<Item = Row> {
        self.figures.into_iter().zip(self.measures).map(
            move |((without, with), (phase, measure))| Row {
                figure: format!("{}: {phase} → {measure}", self.name),
                unit: Unit::PerSecond,
                ratios: vec![Some(with.over(&without))],
                runs: with,
            },
        )
    }
}

/// Accepts spans and discards them. It shares the cores with taskd, as a collector on the same
/// machine would.
struct Collector {
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl Collector {
    async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(Sink));
        let server = tokio::spawn(async move {
            if let Err(error) = server
                .serve_with_incoming(TcpIncoming::from(listener))
                .await
            {
                eprintln!("bench: the collector ended: {error}");
            }
        });
        Ok(Self { address, server })
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Sink;

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        _: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}
