//! Decides when a shard is swept.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::{
    model::ShardId,
    queue::{ShardSnapshot, Swept},
};

/// How many elements per lane one sweep checks.
pub(super) const SWEEP: usize = 512;
/// How often to sweep a shard with spent elements or pointers, unless the last sweep found as many
/// as it could check.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
/// How long to leave out a shard whose sweep removed nothing, unless a snapshot shows a change. The
/// time is limited because changes may cancel out.
const LEFT_OUT: Duration = Duration::from_secs(30);

/// The last sweep of each shard.
#[derive(Default)]
pub(super) struct Sweeps(HashMap<ShardId, Sweep>);

struct Sweep {
    at: Instant,
    /// The state of the shard before the sweep, if that removed nothing.
    in_vain: Option<State>,
}

/// The counts of a snapshot on which a sweep depends: spent elements, open tasks, lanes with
/// pointers.
type State = [u64; 3];

fn state(look: &ShardSnapshot) -> State {
    [look.spent, look.open, look.pointers]
}

impl Sweep {
    fn leaves_out(&self, look: &ShardSnapshot, now: Instant) -> bool {
        let pause = if self.in_vain == Some(state(look)) {
            LEFT_OUT
        } else {
            SWEEP_EVERY
        };
        now.saturating_duration_since(self.at) < pause
    }
}

impl Sweeps {
    /// Returns whether the caller is to sweep the shard now, and records that it does.
    pub(super) fn begin(&mut self, shard: &ShardId, look: &ShardSnapshot, now: Instant) -> bool {
        let may_find = look.spent > 0 || look.pointers > 0;
        if !may_find
            || self
                .0
                .get(shard)
                .is_some_and(|sweep| sweep.leaves_out(look, now))
        {
            return false;
        }
        self.0.insert(
            shard.clone(),
            Sweep {
                at: now,
                in_vain: None,
            },
        );
        true
    }

    /// Records what the sweep after this snapshot did. Returns whether to sweep again at once.
    pub(super) fn end(&mut self, shard: &ShardId, look: &ShardSnapshot, swept: Swept) -> bool {
        if swept.moved + swept.pointers >= SWEEP as u64 {
            self.0.remove(shard);
            return true;
        }
        if let Some(sweep) = self.0.get_mut(shard) {
            sweep.in_vain = (swept == Swept::default()).then(|| state(look));
        }
        false
    }

    /// Forgets sweeps that no longer make a difference.
    pub(super) fn forget_old(&mut self, now: Instant) {
        self.0.retain(|_, sweep| {
            let pause = if sweep.in_vain.is_some() {
                LEFT_OUT
            } else {
                SWEEP_EVERY
            };
            now.saturating_duration_since(sweep.at) < pause
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::QueueName;

    fn shard() -> ShardId {
        ShardId {
            queue: QueueName::new("q").unwrap(),
            number: 0,
        }
    }

    /// Returns how many of the snapshots, a quarter of a second apart, are followed by a sweep with
    /// this result.
    fn sweeps(looks: &[ShardSnapshot], does: Swept) -> usize {
        let mut sweeps = Sweeps::default();
        let mut now = Instant::now();
        let is_swept = |look: &&ShardSnapshot| {
            now += SWEEP_EVERY;
            sweeps.forget_old(now);
            let begins = sweeps.begin(&shard(), look, now);
            if begins {
                sweeps.end(&shard(), look, does);
            }
            begins
        };
        looks.iter().filter(is_swept).count()
    }

    const SPENT: ShardSnapshot = look(1, 1, 0);

    const fn look(spent: u64, open: u64, pointers: u64) -> ShardSnapshot {
        let next = None;
        let is_idle = false;
        ShardSnapshot {
            is_idle,
            expires: false,
            promotes: false,
            next,
            spent,
            pointers,
            outbox: 0,
            settles: false,
            open,
            own_limits: None,
            long_holds: 0,
        }
    }

    #[test]
    fn a_shard_is_swept_while_that_removes_something() {
        assert_eq!(
            sweeps(
                &[SPENT; 100],
                Swept {
                    moved: 1,
                    pointers: 0
                }
            ),
            100
        );
        assert_eq!(
            sweeps(
                &[SPENT; 100],
                Swept {
                    moved: 0,
                    pointers: 1
                }
            ),
            100
        );
        assert_eq!(
            sweeps(&[look(0, 1, 0); 100], Swept::default()),
            0,
            "there is nothing to remove"
        );
    }

    #[test]
    fn a_shard_whose_sweep_removes_nothing_is_left_out_until_a_look_shows_a_change() {
        let nothing = Swept::default();
        assert_eq!(sweeps(&[SPENT; 100], nothing), 1);
        assert_eq!(
            sweeps(&[SPENT; 400], nothing),
            4,
            "each half minute: changes may cancel out"
        );
        for changed in [look(2, 1, 0), look(1, 0, 0), look(1, 2, 0), look(1, 1, 1)] {
            assert_eq!(
                sweeps(&[&[SPENT; 9][..], &[changed; 9]].concat(), nothing),
                2,
                "{changed:?}"
            );
        }
    }

    #[test]
    fn a_sweep_that_removes_a_page_goes_on_at_once() {
        let mut sweeps = Sweeps::default();
        let now = Instant::now();
        let page = SWEEP as u64;
        for (moved, pointers, goes_on) in [(page, 0, true), (0, page, true), (page - 1, 0, false)] {
            assert!(sweeps.begin(&shard(), &SPENT, now));
            assert_eq!(
                sweeps.end(&shard(), &SPENT, Swept { moved, pointers }),
                goes_on
            );
        }
        assert!(!sweeps.begin(&shard(), &SPENT, now));
    }
}
