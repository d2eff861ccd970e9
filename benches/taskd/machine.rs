//! The machine that the figures were measured on.

use std::{fs::File, io::Write, path::Path, process::Command, time::Instant};

use serde_json::{Value, json};

use crate::report::quantile;

pub(crate) struct Machine {
    cores: usize,
    cpu: String,
    kernel: String,
    redis: String,
    commit: String,
    /// The time of one 4 KiB append with fdatasync in the data folder.
    sync_micros: f64,
    /// How many cores other programs use before the measurement.
    pub(crate) busy_cores: f64,
}

impl Machine {
    pub(crate) async fn look(folder: &Path) -> anyhow::Result<Self> {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpu
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Ok(Self {
            cores: std::thread::available_parallelism()?.get(),
            cpu: model.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            redis: said("redis-server", &["--version"], |text| {
                text.split_whitespace()
                    .find_map(|word| word.strip_prefix("v="))
                    .map(str::to_owned)
            }),
            commit: said("git", &["describe", "--always", "--dirty"], |text| {
                Some(text.trim().to_owned())
            }),
            sync_micros: sync_micros(folder)?,
            busy_cores: busy_cores().await?,
        })
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "date": date(), "commit": self.commit, "cores": self.cores, "cpu": self.cpu, "kernel": self.kernel,
            "redis": self.redis, "fdatasync_us": self.sync_micros, "others_cores": self.busy_cores,
        })
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            cores,
            cpu,
            kernel,
            redis,
            commit,
            sync_micros,
            busy_cores,
        } = self;
        write!(
            f,
            "{}, taskd {commit}: {cores} cores ({cpu}), Linux {kernel}, Redis {redis}, ",
            date()
        )?;
        write!(
            f,
            "4 KiB and fdatasync {sync_micros:.0} µs, others use {busy_cores:.2} cores"
        )
    }
}

fn date() -> String {
    let now = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
    now.split('T').next().unwrap_or_default().to_owned()
}

fn said(program: &str, arguments: &[&str], find: impl Fn(&str) -> Option<String>) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    text.ok()
        .and_then(|text| find(&text))
        .filter(|text| !text.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}

/// How many cores are in use while this process is idle.
pub(crate) async fn busy_cores() -> anyhow::Result<f64> {
    // The fields are user, nice, system, idle, iowait, irq, softirq, steal, …, in ticks over all
    // cores.
    let ticks = || -> anyhow::Result<(f64, f64)> {
        let stat = std::fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<f64> = line
            .split_whitespace()
            .skip(1)
            .take(8)
            .filter_map(|n| n.parse().ok())
            .collect();
        let idle: f64 = ticks.iter().skip(3).take(2).sum();
        Ok((ticks.iter().sum(), idle))
    };
    let (all, idle) = ticks()?;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let (all_after, idle_after) = ticks()?;
    let share = 1.0 - (idle_after - idle) / (all_after - all).max(1.0);
    Ok(share * std::thread::available_parallelism()?.get() as f64)
}

fn sync_micros(folder: &Path) -> anyhow::Result<f64> {
    let mut file = File::create(folder.join("sync"))?;
    let mut micros = Vec::new();
    for _ in 0..200 {
        let began = Instant::now();
        file.write_all(&[7; 4096])?;
        file.sync_data()?;
        micros.push(began.elapsed().as_secs_f64() * 1e6);
    }
    Ok(quantile(&micros, 0.5))
}
