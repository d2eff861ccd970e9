//! The figures of all runs, as a table and as JSON.

use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use indicatif::HumanCount;
use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::{
    args::{Bench, Phase, Work},
    server::{Conditions, Usage},
};

/// One figure, in each of the runs; empty if it is unknown.
#[derive(Clone, Debug, Default)]
pub(super) struct Runs(Vec<f64>);

/// A throughput.
#[derive(Serialize)]
struct Rate {
    phase: Phase,
    measure: &'static str,
    per_second: Runs,
    us_per_task: Runs,
    cpu_us_per_task: Option<Cpu>,
}

#[derive(Default, Serialize)]
struct Cpu {
    taskd: Runs,
    redis: Runs,
    bench: Runs,
}

/// A figure of the phases that compare, such as flat, and its ratio to another figure of the same
/// run.
#[derive(Serialize)]
struct Figure {
    phase: Phase,
    measure: String,
    unit: &'static str,
    value: Runs,
    reference: Option<String>,
    ratio: Runs,
}

/// Latencies in ms.
#[derive(Serialize)]
struct Latency {
    measure: &'static str,
    samples: Runs,
    p50: Runs,
    p90: Runs,
    p99: Runs,
    p999: Runs,
    max: Runs,
}

/// The counts over all runs.
#[derive(Default, Serialize)]
pub(super) struct Totals {
    /// Tasks that were inserted and completed, including the warm-up.
    pub(super) tasks: u64,
    /// Completions that were answered with OK.
    pub(super) completions: u64,
    pub(super) lost: u64,
    pub(super) doubled: u64,
    /// Calls that were repeated because taskd was busy or unavailable.
    pub(super) repeated_calls: u64,
}

#[derive(Default)]
pub(super) struct Report {
    rates: Vec<Rate>,
    figures: Vec<Figure>,
    latencies: Vec<Latency>,
    pub(super) totals: Totals,
    wrong: Vec<String>,
    notes: Vec<String>,
}

impl Report {
    /// Records how long a phase took for this many tasks, and the CPU that it used.
    pub(super) fn rate(
        &mut self,
        phase: Phase,
        measure: &'static str,
        tasks: u32,
        took: Duration,
        used: Option<Usage>,
    ) {
        let (tasks, seconds) = (f64::from(tasks), took.as_secs_f64());
        let place = self
            .rates
            .iter()
            .position(|rate| rate.phase == phase && rate.measure == measure);
        let place = place.unwrap_or_else(|| {
            let (per_second, us_per_task) = (Runs::default(), Runs::default());
            self.rates.push(Rate {
                phase,
                measure,
                per_second,
                us_per_task,
                cpu_us_per_task: None,
            });
            self.rates.len() - 1
        });
        let rate = &mut self.rates[place];
        rate.per_second.0.push(tasks / seconds);
        rate.us_per_task.0.push(seconds * 1e6 / tasks);
        if let Some(used) = used {
            let cpu = rate.cpu_us_per_task.get_or_insert_default();
            for (runs, seconds) in [
                (&mut cpu.taskd, used.taskd),
                (&mut cpu.redis, used.redis),
                (&mut cpu.bench, used.bench),
            ] {
                runs.0.extend(seconds.map(|seconds| seconds * 1e6 / tasks));
            }
        }
    }

    /// Records a figure, with the name and the value of the reference that it is compared with.
    pub(super) fn figure(
        &mut self,
        phase: Phase,
        measure: &str,
        unit: &'static str,
        value: Option<f64>,
        reference: Option<(&str, f64)>,
    ) {
        let place = self
            .figures
            .iter()
            .position(|figure| figure.measure == measure)
            .unwrap_or_else(|| {
                let [value, ratio] = <[Runs; 2]>::default();
                let reference = reference.map(|(name, _)| name.to_owned());
                self.figures.push(Figure {
                    phase,
                    measure: measure.to_owned(),
                    unit,
                    value,
                    reference,
                    ratio,
                });
                self.figures.len() - 1
            });
        let figure = &mut self.figures[place];
        figure.value.0.extend(value);
        figure.ratio.0.extend(
            value
                .zip(reference)
                .map(|(value, (_, reference))| value / reference),
        );
    }

    /// Records the latencies of one run.
    pub(super) fn latency(&mut self, measure: &'static str, mut times: Vec<Duration>) {
        times.sort_unstable();
        let place = self
            .latencies
            .iter()
            .position(|latency| latency.measure == measure)
            .unwrap_or_else(|| {
                self.latencies.push(Latency::new(measure));
                self.latencies.len() - 1
            });
        let latency = &mut self.latencies[place];
        latency.samples.0.push(times.len() as f64);
        for (runs, share) in [
            (&mut latency.p50, 0.5),
            (&mut latency.p90, 0.9),
            (&mut latency.p99, 0.99),
            (&mut latency.p999, 0.999),
            (&mut latency.max, 1.0),
        ] {
            runs.0
                .extend(quantile(&times, share).map(|time| time.as_secs_f64() * 1e3));
        }
    }

    /// Records a mistake, in one line.
    pub(super) fn wrong(&mut self, line: String) {
        self.wrong.push(line);
    }

    /// Records why a figure is missing, in one line.
    pub(super) fn note(&mut self, line: String) {
        if !self.notes.contains(&line) {
            self.notes.push(line);
        }
    }

    pub(super) fn mistakes(&self) -> &[String] {
        &self.wrong
    }

    pub(super) fn json(&self, conditions: &Conditions, args: &Bench) -> serde_json::Value {
        serde_json::json!({
            "conditions": conditions, "work": args.work, "flat": args.flat, "limits": args.limits,
            "workflow": args.workflow, "runs": args.runs,
            "rates": self.rates, "figures": self.figures, "latency_ms": self.latencies, "totals": self.totals,
            "wrong": self.wrong, "notes": self.notes,
        })
    }

    pub(super) fn text(&self, conditions: &Conditions, Bench { work, runs, .. }: &Bench) -> String {
        let Work {
            tasks,
            payload,
            replicas,
            queues,
            batch,
            concurrency,
            workers,
            connections,
            ..
        } = work;
        let median = if *runs > 1 {
            format!("; median of {runs} runs (lowest–highest)")
        } else {
            String::new()
        };
        let mut blocks = vec![format!(
            "{}\n{}\n{}\n\n{} tasks of {payload} bytes in {queues} queue(s), NUM {replicas}, {batch} a call, \
             {concurrency} inserts in flight, {workers} workers, {connections} connections{median}",
            conditions.server(),
            conditions.durability(),
            conditions.machine(),
            HumanCount((*tasks).into()),
        )];
        if !self.rates.is_empty() {
            blocks.push(self.rate_table().to_string());
        }
        if !self.figures.is_empty() {
            blocks.push(self.figure_table().to_string());
        }
        if !self.latencies.is_empty() {
            let rate = HumanCount(work.rate.into());
            blocks.push(format!(
                "Latency at {rate} tasks/s for {}, one task a call, in ms",
                work.duration
            ));
            blocks.push(self.latency_table().to_string());
        }
        blocks.push(self.totals.text(*replicas, self.wrong.is_empty()));
        blocks.extend(self.notes.iter().cloned());
        blocks.join("\n")
    }

    fn rate_table(&self) -> Table {
        let cpu = |name: &str| format!("CPU µs, {name}");
        let header = ["phase", "", "tasks/s", "µs/task"].map(str::to_owned);
        let mut table = table(
            header
                .into_iter()
                .chain(["taskd", "Redis", "bench"].map(cpu)),
        );
        for rate in &self.rates {
            let cpu = rate.cpu_us_per_task.as_ref();
            let cpu =
                cpu.map(|cpu| [&cpu.taskd, &cpu.redis, &cpu.bench].map(|runs| runs.show(short)));
            let figures = [
                rate.phase.as_str().to_owned(),
                rate.measure.to_owned(),
                rate.per_second
                    .show(|value| HumanCount(value as u64).to_string()),
                rate.us_per_task.show(short),
            ];
            table.add_row(figures.into_iter().chain(cpu.unwrap_or_default()));
        }
        right(table, 2)
    }

    fn figure_table(&self) -> Table {
        let mut table = table(
            ["phase", "", "", "", "ratio", "to"]
                .map(str::to_owned)
                .into_iter(),
        );
        for Figure {
            phase,
            measure,
            unit,
            value,
            reference,
            ratio,
        } in &self.figures
        {
            let ratio = if ratio.0.is_empty() {
                String::new()
            } else {
                ratio.show(short)
            };
            let reference = reference.clone().unwrap_or_default();
            let (phase, value) = (phase.as_str().to_owned(), value.show(short));
            table.add_row([
                phase,
                measure.clone(),
                value,
                (*unit).to_owned(),
                ratio,
                reference,
            ]);
        }
        right(table, 2)
    }

    fn latency_table(&self) -> Table {
        let mut table = table(
            ["", "p50", "p90", "p99", "p99.9", "max"]
                .map(str::to_owned)
                .into_iter(),
        );
        for Latency {
            measure,
            p50,
            p90,
            p99,
            p999,
            max,
            ..
        } in &self.latencies
        {
            let times = [p50, p90, p99, p999, max].map(|runs| runs.show(short));
            table.add_row(std::iter::once((*measure).to_owned()).chain(times));
        }
        right(table, 1)
    }
}

impl Totals {
    fn text(&self, replicas: u16, is_right: bool) -> String {
        let Self {
            tasks,
            completions,
            lost,
            doubled,
            repeated_calls,
        } = self;
        let (tasks, completions) = (HumanCount(*tasks), HumanCount(*completions));
        let mut text = if is_right {
            format!(
                "Counted: {tasks} tasks, {completions} completions: each task exactly NUM = {replicas} times"
            )
        } else {
            format!(
                "WRONG: {tasks} tasks, {completions} completions, {lost} lost, {doubled} completed too often"
            )
        };
        if *repeated_calls > 0 {
            text.push_str(&format!(
                "; {} calls were repeated (taskd was busy or away)",
                HumanCount(*repeated_calls)
            ));
        }
        text
    }
}

impl Latency {
    fn new(measure: &'static str) -> Self {
        let [samples, p50, p90, p99, p999, max] = <[Runs; 6]>::default();
        Self {
            measure,
            samples,
            p50,
            p90,
            p99,
            p999,
            max,
        }
    }
}

impl Runs {
    fn median(&self) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let (low, high) = (sorted.len().saturating_sub(1) / 2, sorted.len() / 2);
        Some(f64::midpoint(*sorted.get(low)?, *sorted.get(high)?))
    }

    fn bounds(&self) -> (f64, f64) {
        self.0
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(*value), high.max(*value))
            })
    }

    fn show(&self, number: impl Fn(f64) -> String) -> String {
        let Some(median) = self.median() else {
            return "unknown".to_owned();
        };
        let (low, high) = self.bounds();
        match self.0.len() {
            1 => number(median),
            _ => format!("{} ({}–{})", number(median), number(low), number(high)),
        }
    }
}

/// Serialized as `null` if the figure is unknown.
impl Serialize for Runs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(median) = self.median() else {
            return serializer.serialize_none();
        };
        let (min, max) = self.bounds();
        let mut fields = serializer.serialize_struct("Runs", 4)?;
        fields.serialize_field("median", &median)?;
        fields.serialize_field("min", &min)?;
        fields.serialize_field("max", &max)?;
        fields.serialize_field("runs", &self.0)?;
        fields.end()
    }
}

/// The time that this share of `sorted` does not exceed.
pub(super) fn quantile(sorted: &[Duration], share: f64) -> Option<Duration> {
    let place = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(place.max(1) - 1).copied()
}

/// Formats about three digits.
fn short(value: f64) -> String {
    match value {
        value if value >= 100.0 => HumanCount(value.round() as u64).to_string(),
        value if value >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn table(header: impl Iterator<Item = String>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(header);
    table
}

fn right(mut table: Table, from: usize) -> Table {
    table
        .column_iter_mut()
        .skip(from)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_time_that_was_measured() {
        let times: Vec<Duration> = (1..=1000).map(Duration::from_millis).collect();
        let at = |share| quantile(&times, share).map(|time| time.as_millis());
        assert_eq!(
            [0.5, 0.9, 0.99, 0.999, 1.0].map(at),
            [500, 900, 990, 999, 1000].map(Some)
        );
        assert_eq!(quantile(&times[..1], 0.5), Some(Duration::from_millis(1)));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn a_figure_is_its_median_with_its_bounds_and_nothing_is_made_up() {
        let runs = Runs(vec![3.0, 1.0, 2.0]);
        assert_eq!(runs.show(short), "2.00 (1.00–3.00)");
        assert_eq!(Runs(vec![4.0, 1.0]).show(short), "2.50 (1.00–4.00)");
        let json = serde_json::to_value(&runs).expect("JSON");
        assert_eq!(
            json,
            serde_json::json!({"median": 2.0, "min": 1.0, "max": 3.0, "runs": [3.0, 1.0, 2.0]})
        );
        assert_eq!(Runs::default().show(short), "unknown");
        assert!(
            serde_json::to_value(Runs::default())
                .expect("JSON")
                .is_null()
        );
    }
}
