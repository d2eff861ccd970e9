//! Every metric: its name, unit and labels. Names are `taskd_<subject>_<what>_<unit>[_total]`.

use std::time::Duration;

/// One script call.
pub fn redis_script(script: &'static str, took: Duration) {
    metrics::histogram!("taskd_redis_script_seconds", "script" => script).record(took);
}

/// How many callers went together in one call.
pub fn redis_combined(script: &'static str, callers: usize) {
    metrics::histogram!("taskd_redis_combined_callers", "script" => script).record(callers as f64);
}
