//! Payloads of discovered tasks that do not match the schemas of their queues.

use std::collections::HashSet;

use crate::{
    config::Settings,
    model::{Completion, ECHO, Item, PayloadCheck, shorten},
    runtime::compute,
};

/// The place of a discovered task: the index of its completion in the call, and its own index in
/// the completion.
pub(super) type Place = (usize, usize);

/// Records in their reports the discovered tasks whose payload does not match. Their completions
/// count nevertheless: the pipeline that stores the other tasks sends these to dead-letters.
///
/// The tasks in `known` are invalid for another reason, and are recorded already.
pub(super) async fn note_misfits(
    settings: &Settings,
    items: &mut [Item<Completion>],
    known: &HashSet<Place>,
    max_discovered: usize,
) {
    let mut check = PayloadCheck::default();
    let mut checked = Vec::new();
    for (place, item) in items.iter().enumerate() {
        let Ok(completion) = &item.report else {
            continue;
        };
        // A completion with more of them is refused for that.
        for (index, task) in completion
            .discovered
            .iter()
            .enumerate()
            .take(max_discovered)
        {
            if let Some(schema) = settings
                .payload_schema(&task.queue)
                .filter(|_| !known.contains(&(place, index)))
            {
                check.add(checked.len(), schema, &task.payload, task.payload_encoding);
                checked.push((place, index));
            }
        }
    }
    let check = compute(check, PayloadCheck::advance_quickly, PayloadCheck::advance).await;
    let mut misfits: Vec<_> = check.misfits().into_iter().collect();
    misfits.sort_unstable_by_key(|(number, _)| *number);
    for (number, misfit) in misfits {
        let (place, index) = checked[number];
        let Ok(completion) = &mut items[place].report else {
            continue;
        };
        let key = String::from_utf8_lossy(&completion.discovered[index].key);
        completion
            .not_stored
            .add(|| format!("discovered key {:?}: {}", shorten(&key, ECHO), misfit.says));
    }
}
