//! Figures, and their output as a table, as JSON lines, or as Markdown with only the ratios.

use comfy_table::{CellAlignment, Table as Grid, presets};
use serde_json::{Value, json};

/// One figure, in each of the runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runs(pub(crate) Vec<f64>);

impl Runs {
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Divides run by run, so that whatever slows down a whole run cancels out.
    pub(crate) fn over(&self, reference: &Self) -> Self {
        Self(
            self.0
                .iter()
                .zip(&reference.0)
                .map(|(value, of)| value / of)
                .collect(),
        )
    }

    pub(crate) fn median(&self) -> f64 {
        quantile(&self.0, 0.5)
    }

    fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn max(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    fn show(&self, number: impl Fn(f64) -> String) -> String {
        match &self.0[..] {
            [] => String::new(),
            [one] => number(*one),
            _ => format!(
                "{} ({}–{})",
                number(self.median()),
                number(self.min()),
                number(self.max())
            ),
        }
    }

    fn json(&self) -> Value {
        json!({"median": self.median(), "min": self.min(), "max": self.max()})
    }
}

/// The quantile `q` of `values`.
pub(crate) fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let place = (q * (sorted.len().max(1) - 1) as f64).round() as usize;
    sorted.get(place).copied().unwrap_or(f64::NAN)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    PerSecond,
    Micros,
    /// Seconds per 100,000 tasks.
    Seconds,
    Bytes,
    PercentOfACore,
    /// The unit is part of the figure's name.
    Plain,
}

impl Unit {
    fn as_str(self) -> &'static str {
        match self {
            Self::PerSecond => "/s",
            Self::Micros => "µs",
            Self::Seconds => "s",
            Self::Bytes => "bytes",
            Self::PercentOfACore => "% of a core",
            Self::Plain => "",
        }
    }

    fn number(self, value: f64) -> String {
        match self {
            Self::PerSecond | Self::Bytes => thousands(value),
            Self::Seconds | Self::PercentOfACore => format!("{value:.2}"),
            Self::Micros | Self::Plain if value.abs() < 1000.0 => format!("{value:.1}"),
            Self::Micros | Self::Plain => thousands(value),
        }
    }
}

fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn ratio(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => thousands(value),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

pub(crate) struct Row {
    pub(crate) figure: String,
    pub(crate) unit: Unit,
    pub(crate) runs: Runs,
    /// One per reference of the table; `None` if there is nothing to compare with.
    pub(crate) ratios: Vec<Option<Runs>>,
}

pub(crate) struct Table {
    pub(crate) bench: &'static str,
    pub(crate) title: &'static str,
    /// Durability, batches and connections, without which the figures are meaningless.
    pub(crate) conditions: String,
    pub(crate) references: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Human,
    Json,
    Markdown,
}

impl Table {
    pub(crate) fn print(&self, form: Form) {
        if self.rows.is_empty() {
            return;
        }
        match form {
            Form::Human => println!("\n{}\n{}\n{}", self.title, self.conditions, self.grid()),
            Form::Json => self
                .rows
                .iter()
                .for_each(|row| println!("{}", self.json(row))),
            Form::Markdown => println!(
                "\n### {}\n\n{}\n\n{}",
                self.title,
                self.conditions,
                self.markdown()
            ),
        }
    }

    fn grid(&self) -> Grid {
        let mut grid = Grid::new();
        grid.load_style(presets::UTF8_BORDERS_ONLY);
        let references = self.references.iter().map(|name| format!("÷ {name}"));
        grid.set_header(
            ["".to_owned(), "median (min–max)".to_owned()]
                .into_iter()
                .chain(references),
        );
        for row in &self.rows {
            let value = format!(
                "{} {}",
                row.runs.show(|n| row.unit.number(n)),
                row.unit.as_str()
            );
            grid.add_row([row.figure.clone(), value].into_iter().chain(row.ratios()));
        }
        grid.column_iter_mut()
            .skip(1)
            .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        grid
    }

    fn json(&self, row: &Row) -> Value {
        let ratios = self.references.iter().zip(&row.ratios);
        let ratios = ratios.filter_map(|(name, runs)| Some((name.clone(), runs.as_ref()?.json())));
        json!({
            "bench": self.bench,
            "figure": row.figure,
            "unit": row.unit.as_str(),
            "runs": row.runs.0,
            "median": row.runs.median(),
            "min": row.runs.min(),
            "max": row.runs.max(),
            "ratios": ratios.collect::<serde_json::Map<_, _>>(),
            "conditions": self.conditions,
        })
    }

    /// Leaves out the absolute figures, because they depend on the machine.
    fn markdown(&self) -> String {
        let mut lines = vec![
            format!("| | ÷ {} |", self.references.join(" | ÷ ")),
            format!("|---|{}", "---:|".repeat(self.references.len())),
        ];
        let compared = self
            .rows
            .iter()
            .filter(|row| row.ratios.iter().any(Option::is_some));
        lines.extend(
            compared.map(|row| format!("| {} | {} |", row.figure, row.ratios().join(" | "))),
        );
        lines.join("\n")
    }
}

impl Row {
    fn ratios(&self) -> Vec<String> {
        self.ratios
            .iter()
            .map(|runs| runs.as_ref().map_or(String::new(), |runs| runs.show(ratio)))
            .collect()
    }
}
