//! Converts the text format of Prometheus to OpenMetrics, which supports exemplars.

/// The content type of [`openmetrics`].
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Converts the text of a Prometheus exporter to OpenMetrics, and lets `exemplar` append to each
/// line.
///
/// The formats differ little: in OpenMetrics the family of a counter is named without `_total`,
/// there are no empty lines, and the text ends with `# EOF`.
pub(super) fn openmetrics(text: &str, exemplar: impl Fn(&mut String)) -> String {
    let counters: Vec<&str> = text.lines().filter_map(counter).collect();
    let mut shown = String::with_capacity(text.len() + text.len() / 8);
    for line in text.lines().filter(|line| !line.is_empty()) {
        let mut line = match line.strip_prefix("# ") {
            Some(comment) => of_family(comment, &counters),
            None => line.to_owned(),
        };
        exemplar(&mut line);
        shown.push_str(&line);
        shown.push('\n');
    }
    shown.push_str("# EOF\n");
    shown
}

/// Returns the name in a line `# TYPE name counter`.
fn counter(line: &str) -> Option<&str> {
    line.strip_prefix("# TYPE ")?.strip_suffix(" counter")
}

/// Converts a line `# HELP name …` or `# TYPE name …`.
fn of_family(comment: &str, counters: &[&str]) -> String {
    let mut parts = comment.splitn(3, ' ');
    let what = parts.next().unwrap_or_default();
    let name = parts.next().unwrap_or_default();
    let rest = parts.next().unwrap_or_default();
    let is_counter = counters.contains(&name);
    let (name, rest) = match (name.strip_suffix("_total"), what, rest) {
        (Some(base), _, rest) if is_counter => (base, rest),
        // OpenMetrics has no counters without `_total`.
        (None, "TYPE", _) if is_counter => (name, "unknown"),
        (_, "TYPE", "untyped") => (name, "unknown"),
        (_, _, rest) => (name, rest),
    };
    format!("# {what} {name} {rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_the_names_of_openmetrics() {
        let text = "# HELP a_total As\n# TYPE a_total counter\na_total 1\n\n# TYPE b counter\nb 2\n\n\
                    # HELP c_total No counter\n# TYPE c_total gauge\nc_total 3\n# TYPE d untyped\nd 4\n";
        let shown = openmetrics(text, |line| {
            if line == "d 4" {
                line.push_str(" # {}");
            }
        });
        let expected = "# HELP a As\n# TYPE a counter\na_total 1\n# TYPE b unknown\nb 2\n# HELP c_total No counter\n\
                        # TYPE c_total gauge\nc_total 3\n# TYPE d unknown\nd 4 # {}\n# EOF\n";
        assert_eq!(shown, expected);
    }
}
