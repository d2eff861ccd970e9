//! Payloads of discovered tasks that do not fit the schemas of their queues.

use crate::{
    config::Settings,
    model::{Completion, Item, PayloadCheck},
    runtime::compute,
};

/// Turns completions that discovered such a task into mistakes: nobody could tell the worker later.
pub(super) async fn check(settings: &Settings, items: &mut [Item<Completion>], max_discovered: usize) {
    let (mut check, mut discovered) = (PayloadCheck::default(), Vec::new());
    for (place, item) in items.iter().enumerate() {
        let Ok(completion) = &item.report else { continue };
        // A completion with more of them is refused for that.
        for (index, task) in completion.discovered.iter().enumerate().take(max_discovered) {
            let fits_limit = task.payload.len() <= settings.limits.max_payload_bytes;
            if let Some(schema) = settings.payload_schema(&task.queue).filter(|_| fits_limit) {
                check.add(discovered.len(), schema, &task.payload, task.payload_encoding);
                discovered.push((place, index));
            }
        }
    }
    let mut misfits: Vec<_> =
        compute(check, PayloadCheck::advance_quickly, PayloadCheck::advance).await.misfits().into_iter().collect();
    // Backwards, so that the first mistake of an item stays.
    misfits.sort_unstable_by_key(|(number, _)| std::cmp::Reverse(*number));
    for (number, misfit) in misfits {
        let (place, index) = discovered[number];
        items[place].report = Err(format!("discovered[{index}]: {}", misfit.says));
    }
}
