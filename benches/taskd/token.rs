//! An access token with each call, beside calls without one in the same run: what the check of a token costs.

use crate::{
    command::{bench, rate_of},
    progress::Progress,
    report::{Row, Runs, Table, Unit},
    scale::Scale,
};

/// One task a call: the check is a part of each call, and no task shares it.
const MEASURES: [(&str, &str, &str); 2] =
    [("tasks inserted, 1 a call", "insert", "accepted"), ("tasks completed, 1 a call", "process", "completed")];

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let mut figures: [(Runs, Runs); 2] = Default::default();
    let tasks = scale.single_tasks.to_string();
    let arguments = ["insert", "process", "--tasks", &tasks, "--batch", "1"];
    for run in 1..=scale.runs {
        progress.step(format!("token, run {run} of {}: without", scale.runs));
        let without = bench(&arguments).await?;
        progress.step(format!("token, run {run} of {}: with", scale.runs));
        let with = bench(&[&arguments[..], &["--with-token"]].concat()).await?;
        for ((of_without, of_with), (_, phase, measure)) in figures.iter_mut().zip(MEASURES) {
            of_without.push(rate_of(&without, phase, measure)?);
            of_with.push(rate_of(&with, phase, measure)?);
        }
    }
    let rows = figures.into_iter().zip(MEASURES).map(|((without, with), (figure, ..))| Row {
        figure: figure.to_owned(),
        unit: Unit::PerSecond,
        ratios: vec![Some(with.over(&without))],
        runs: with,
    });
    Ok(vec![Table {
        bench: "token",
        title: "token: tasks a second with an access token in each call",
        conditions: format!("embedded defaults; {tasks} tasks; each run beside one of a taskd that asks for no token"),
        references: vec!["without a token".to_owned()],
        rows: rows.collect(),
    }])
}
