//! Settings that have no effect because another one is missing.

use super::{load::Loaded, settings::QueueSettings, traces::Traces};

/// Returns a line for each setting that was changed from its default but has no effect without
/// another setting. That is not an error, because several processes and commands with different
/// endpoints may share a file.
pub fn without_effect(Loaded { settings, origins }: &Loaded) -> Vec<String> {
    let mut lines = Vec::new();
    let mut add = |key: String, needs: &str| {
        lines.extend(
            origins
                .describe(&key)
                .map(|origin| format!("{key} ({origin}) does nothing without {needs}")),
        );
    };
    if settings.traces.endpoint.is_empty() {
        of_endpoint(&settings.traces)
            .into_iter()
            .for_each(|key| add(key.to_owned(), "otlp_endpoint"));
    }
    let has_url = |queue: &QueueSettings| queue.enrich_url.0.is_some();
    let queues = &settings.queues;
    if !has_url(&queues.default) && !queues.named.values().any(has_url) {
        enriching(&queues.default)
            .into_iter()
            .for_each(|key| add(format!("queues.default.{key}"), "enrich_url"));
    }
    for (name, queue) in queues.named.iter().filter(|(_, queue)| !has_url(queue)) {
        enriching(queue)
            .into_iter()
            .for_each(|key| add(format!("queues.{name}.{key}"), "enrich_url"));
    }
    lines
}

/// The changed settings that apply to the traces endpoint.
fn of_endpoint(traces: &Traces) -> Vec<&'static str> {
    let usual = Traces::default();
    changed([
        ("otlp_protocol", traces.protocol != usual.protocol),
        ("otlp_headers", traces.headers != usual.headers),
        ("otlp_timeout", traces.timeout != usual.timeout),
        (
            "trace_sample",
            traces.sample.total_cmp(&usual.sample).is_ne(),
        ),
        ("trace_discovered", traces.discovered != usual.discovered),
    ])
}

/// The changed settings that apply to the enrichment endpoint of a queue.
fn enriching(queue: &QueueSettings) -> Vec<&'static str> {
    let usual = QueueSettings::default();
    changed([
        ("enrich_header", queue.enrich_header != usual.enrich_header),
        (
            "enrich_timeout",
            queue.enrich_timeout != usual.enrich_timeout,
        ),
        (
            "enrich_batch_tasks",
            queue.enrich_batch_tasks != usual.enrich_batch_tasks,
        ),
        (
            "enrich_batch_bytes",
            queue.enrich_batch_bytes != usual.enrich_batch_bytes,
        ),
        (
            "enrich_answer_bytes",
            queue.enrich_answer_bytes != usual.enrich_answer_bytes,
        ),
        (
            "enrich_concurrency",
            queue.enrich_concurrency != usual.enrich_concurrency,
        ),
        (
            "enrich_failures",
            queue.enrich_failures != usual.enrich_failures,
        ),
        ("enrich_pause", queue.enrich_pause != usual.enrich_pause),
    ])
}

fn changed<const N: usize>(settings: [(&'static str, bool); N]) -> Vec<&'static str> {
    settings
        .into_iter()
        .filter(|(_, is_changed)| *is_changed)
        .map(|(key, _)| key)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{EnrichUrl, Origin, Origins, Settings},
        model::QueueName,
    };

    fn given(settings: Settings, keys: &[&str]) -> Vec<String> {
        let mut origins = Origins::default();
        for key in keys {
            origins.insert((*key).to_owned(), Origin::Environment);
        }
        without_effect(&Loaded { settings, origins })
    }

    #[test]
    fn a_setting_without_its_endpoint_is_named_with_its_place() {
        let mut settings = Settings::default();
        settings.traces.sample = 0.1;
        let keys = ["trace_sample", "otlp_timeout"];
        let want = "trace_sample (TASKD_TRACE_SAMPLE) does nothing without otlp_endpoint";
        assert_eq!(
            given(settings.clone(), &keys),
            [want],
            "otlp_timeout is given as it is by default"
        );
        assert_eq!(given(settings.clone(), &[]), [""; 0]);
        settings.traces.endpoint = "http://h:4317".into();
        assert_eq!(given(settings, &keys), [""; 0]);
    }

    #[test]
    fn settings_of_all_queues_may_be_for_the_endpoint_of_one() {
        let default = "queues.default.enrich_failures";
        let named = "queues.crawl.enrich_failures";
        let mut settings = Settings::default();
        settings.queues.default.enrich_failures = 3;
        let name = QueueName::new("crawl").unwrap();
        settings
            .queues
            .named
            .insert(name.clone(), settings.queues.default.clone());
        let does_nothing = |key: &str| {
            let variable = key.replace('.', "_").to_uppercase();
            format!("{key} (TASKD_{variable}) does nothing without enrich_url")
        };
        assert_eq!(given(settings.clone(), &[default]), [does_nothing(default)]);
        assert_eq!(
            given(settings.clone(), &[default, named]),
            [does_nothing(default), does_nothing(named)]
        );
        let url = EnrichUrl(Some("http://h/".parse().unwrap()));
        settings.queues.named.get_mut(&name).unwrap().enrich_url = url;
        assert_eq!(given(settings, &[default, named]), [""; 0]);
    }
}
