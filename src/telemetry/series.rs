//! The recorders of series. Series of queues are dropped when nothing is recorded for them any
//! more, since new names of queues may come for ever.

use std::{sync::Arc, time::Duration};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use metrics_util::MetricKindMask;

use super::error::Error;

/// The label that marks a series as one of a queue.
const QUEUE: &str = "queue";

/// How long a queue's gauge is kept without an update. Those of existing queues are set every other
/// second.
const GAUGES_IDLE: Duration = Duration::from_secs(60);
const GAUGES_IDLE_LEAST: Duration = Duration::from_secs(5);

/// Renders what [`Recorders`] has recorded. Clones share it.
#[derive(Clone)]
pub struct Handle(Arc<[PrometheusHandle]>);

impl Handle {
    pub fn render(&self) -> String {
        self.0.iter().map(PrometheusHandle::render).collect()
    }

    /// Moves what histograms have gathered into their buckets.
    pub(super) fn run_upkeep(&self) {
        self.0.iter().for_each(PrometheusHandle::run_upkeep);
    }
}

impl From<PrometheusHandle> for Handle {
    fn from(handle: PrometheusHandle) -> Self {
        Self([handle].into())
    }
}

/// One recorder for the series that last, and one each for the queues' gauges, counters and
/// histograms.
pub(super) struct Recorders {
    lasting: PrometheusRecorder,
    gauges: PrometheusRecorder,
    counters: PrometheusRecorder,
    histograms: PrometheusRecorder,
}

impl Recorders {
    /// A queue's series are dropped when nothing was recorded for it for `forget`. Zero: never.
    ///
    /// `lasting` and `of_queues` have the same buckets.
    pub(super) fn new(
        lasting: PrometheusBuilder,
        of_queues: PrometheusBuilder,
        forget: Duration,
    ) -> Self {
        let idle = |mask, after| {
            PrometheusBuilder::new()
                .idle_timeout(mask, after)
                .build_recorder()
        };
        let counted = (!forget.is_zero()).then_some(forget);
        let gauges = (!forget.is_zero()).then(|| forget.clamp(GAUGES_IDLE_LEAST, GAUGES_IDLE));
        Self {
            lasting: lasting.build_recorder(),
            gauges: idle(MetricKindMask::GAUGE, gauges),
            counters: idle(MetricKindMask::COUNTER, counted),
            histograms: of_queues
                .idle_timeout(MetricKindMask::HISTOGRAM, counted)
                .build_recorder(),
        }
    }

    pub(super) fn handle(&self) -> Handle {
        Handle(self.all().map(PrometheusRecorder::handle).into())
    }

    /// Installs them for the whole process.
    pub(super) fn install(self) -> Result<(), Error> {
        metrics::set_global_recorder(self).map_err(|_| Error::Installed)
    }

    fn all(&self) -> [&PrometheusRecorder; 4] {
        [
            &self.lasting,
            &self.gauges,
            &self.counters,
            &self.histograms,
        ]
    }
}

fn is_of_queue(key: &Key) -> bool {
    key.labels().any(|label| label.key() == QUEUE)
}

impl Recorder for Recorders {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.all()
            .iter()
            .for_each(|one| one.describe_counter(key.clone(), unit, description.clone()));
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.all()
            .iter()
            .for_each(|one| one.describe_gauge(key.clone(), unit, description.clone()));
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.all()
            .iter()
            .for_each(|one| one.describe_histogram(key.clone(), unit, description.clone()));
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        let recorder = if is_of_queue(key) {
            &self.counters
        } else {
            &self.lasting
        };
        recorder.register_counter(key, metadata)
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        let recorder = if is_of_queue(key) {
            &self.gauges
        } else {
            &self.lasting
        };
        recorder.register_gauge(key, metadata)
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        let recorder = if is_of_queue(key) {
            &self.histograms
        } else {
            &self.lasting
        };
        recorder.register_histogram(key, metadata)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_of_a_queue_leave_when_nothing_is_recorded_and_the_others_stay() {
        let recorders = Recorders::new(
            PrometheusBuilder::new(),
            PrometheusBuilder::new(),
            Duration::from_millis(1),
        );
        let gauges = PrometheusBuilder::new()
            .idle_timeout(MetricKindMask::GAUGE, Some(Duration::from_millis(1)));
        let recorders = Recorders {
            gauges: gauges.build_recorder(),
            ..recorders
        };
        let handle = recorders.handle();
        metrics::with_local_recorder(&recorders, || {
            metrics::gauge!("depth", QUEUE => "q").set(1);
            metrics::counter!("claimed", QUEUE => "q").increment(1);
            metrics::histogram!("took", QUEUE => "q").record(1.0);
            metrics::gauge!("leads").set(1);
            metrics::counter!("calls", "method" => "get").increment(1);
        });
        let of_queue = [
            "depth{queue=\"q\"} 1",
            "claimed{queue=\"q\"} 1",
            "took_count{queue=\"q\"} 1",
        ];
        let lasting = ["leads 1", "calls{method=\"get\"} 1"];
        let first = handle.render();
        assert!(
            of_queue
                .iter()
                .chain(&lasting)
                .all(|line| first.contains(line)),
            "{first}"
        );
        // A series is idle from the rendering that first finds it unchanged.
        let began = std::time::Instant::now();
        let mut text = first;
        while of_queue.iter().any(|line| text.contains(line)) {
            assert!(
                began.elapsed() < Duration::from_secs(30),
                "they stay: {text}"
            );
            text = handle.render();
        }
        assert!(lasting.iter().all(|line| text.contains(line)), "{text}");
    }
}
