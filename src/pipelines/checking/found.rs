//! The findings (*finds* in code) of a check, up to a limit.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Find, FindKind};

/// The most findings that a check keeps. Further ones are only counted.
const OF_A_CHECK: usize = 5_000;
/// The most findings that several checks together keep.
const OF_ALL: usize = 10_000;

/// The findings of a check, and the counts of those that it leaves out.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Without repetitions: a scan may show an entry twice.
    pub finds: BTreeSet<Find>,
    /// The numbers of findings beyond the limit. They are repaired like the others.
    pub more: BTreeMap<FindKind, u64>,
    /// The number of suspected tasks that the check could not verify.
    pub unchecked: u64,
}

impl Found {
    pub fn add(&mut self, find: Find) {
        self.add_up_to(find, OF_A_CHECK);
    }

    pub fn is_empty(&self) -> bool {
        self.finds.is_empty() && self.more.is_empty()
    }

    /// Adds what another check found.
    pub fn absorb(&mut self, other: Self) {
        other
            .finds
            .into_iter()
            .for_each(|find| self.add_up_to(find, OF_ALL));
        for (kind, count) in other.more {
            *self.more.entry(kind).or_default() += count;
        }
        self.unchecked += other.unchecked;
    }

    fn add_up_to(&mut self, find: Find, most: usize) {
        if self.finds.len() < most {
            self.finds.insert(find);
        } else if !self.finds.contains(&find) {
            *self.more.entry(find.kind).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(n: usize) -> Find {
        let kind = FindKind::LostPayload;
        let queue = "q".to_owned();
        Find::new(kind, queue, Some(0), None, n.to_string(), false)
    }

    #[test]
    fn beyond_the_bound_finds_are_counted() {
        let mut found = Found::default();
        (0..OF_A_CHECK + 7)
            .chain(0..3)
            .for_each(|n| found.add(find(n)));
        assert_eq!(
            (found.finds.len(), found.more[&FindKind::LostPayload]),
            (OF_A_CHECK, 7)
        );
        let mut all = Found {
            unchecked: 1,
            ..Found::default()
        };
        (0..OF_A_CHECK - 1).for_each(|n| all.add(find(n + OF_ALL)));
        all.absorb(Found {
            unchecked: 2,
            ..found
        });
        assert_eq!(
            (
                all.finds.len(),
                all.more[&FindKind::LostPayload],
                all.unchecked
            ),
            (2 * OF_A_CHECK - 1, 7, 3)
        );
        (0..4).for_each(|n| {
            all.absorb(Found {
                finds: [find(n + 3 * OF_ALL)].into(),
                ..Found::default()
            })
        });
        assert_eq!(
            (all.finds.len(), all.more[&FindKind::LostPayload]),
            (OF_ALL, 10)
        );
    }
}
