//! Which stages lie between a fork and its join.
//!
//! The stages on the ways from a fork to its join, without both, lie one *level* deeper than these.
//! Levels lie in each other or apart, so each stage has the joins around it, outermost first.

use super::{Edge, Stage};
use crate::model::{MOST_LEVELS, Way};

/// The join of a stage and the stages around it.
struct Level {
    join: usize,
    fork: usize,
    /// For each stage, whether it lies between the two.
    has: Vec<bool>,
}

/// A mistake, and the place of its stage.
type Wrong = (usize, String);

/// Decides for each edge which way its outputs go through the levels. Returns what is wrong with the
/// joins otherwise.
pub(super) fn set_ways(stages: &mut [Stage]) -> Result<(), Vec<Wrong>> {
    let levels = find(stages);
    let mut wrong = Vec::new();
    for level in &levels {
        wrong.extend(level.mistakes(stages));
    }
    for (place, one) in levels.iter().enumerate() {
        for other in &levels[place + 1..] {
            wrong.extend(one.crosses(other, stages));
        }
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let around = around(&levels, stages.len());
    if let Some(deep) = around.iter().position(|joins| joins.len() > MOST_LEVELS) {
        let says = format!(
            "stage {} lies in more than {MOST_LEVELS} joins",
            stages[deep].name
        );
        return Err(vec![(deep, says)]);
    }
    let ways: Vec<Vec<Way>> = (0..stages.len())
        .map(|from| {
            let edges = stages[from].edges.iter();
            edges
                .map(|edge| way(stages, &levels, &around, from, edge))
                .collect()
        })
        .collect();
    for (stage, ways) in stages.iter_mut().zip(ways) {
        for (edge, way) in stage.edges.iter_mut().zip(ways) {
            edge.way = way;
        }
    }
    Ok(())
}

fn find(stages: &[Stage]) -> Vec<Level> {
    let with_join = stages.iter().enumerate();
    let with_join = with_join.filter_map(|(join, stage)| Some((join, stage.join?)));
    with_join
        .map(|(join, fork)| {
            let ahead = reached(stages, fork, join, |stages, from| {
                stages[from].edges.iter().map(|edge| edge.to).collect()
            });
            let behind = reached(stages, join, fork, |stages, to| {
                let into = |from: &usize| stages[*from].edges.iter().any(|edge| edge.to == to);
                (0..stages.len()).filter(into).collect()
            });
            let has = ahead.iter().zip(&behind).map(|(a, b)| *a && *b).collect();
            Level { join, fork, has }
        })
        .collect()
}

/// The stages that can be reached from `from` without passing through `from` or `without`.
fn reached(
    stages: &[Stage],
    from: usize,
    without: usize,
    next: impl Fn(&[Stage], usize) -> Vec<usize>,
) -> Vec<bool> {
    let mut reached = vec![false; stages.len()];
    let mut to_do = vec![from];
    while let Some(stage) = to_do.pop() {
        for next in next(stages, stage) {
            if next != from && next != without && !reached[next] {
                reached[next] = true;
                to_do.push(next);
            }
        }
    }
    reached
}

impl Level {
    fn mistakes(&self, stages: &[Stage]) -> Vec<Wrong> {
        let Self { join, fork, .. } = *self;
        let (of_join, of_fork) = (&stages[join].name, &stages[fork].name);
        if join == fork {
            return vec![(join, format!("stage {of_join} cannot join itself"))];
        }
        let mut wrong = Vec::new();
        let is_reached = stages.iter().flat_map(|stage| &stage.edges);
        if !is_reached.into_iter().any(|edge| edge.to == join) {
            let says =
                format!("stage {of_join} is a join, and nothing goes into it: from is missing");
            wrong.push((join, says));
        } else if stages[join].is_start {
            let says =
                format!("stage {of_join} is a join, so nothing begins there: leave out start");
            wrong.push((join, says));
        }
        let leads = |edge: &Edge| edge.to == join;
        if !self.has.contains(&true) && !stages[fork].edges.iter().any(leads) {
            let says = format!("no way leads from stage {of_fork} to stage {of_join}");
            wrong.push((join, says));
            return wrong;
        }
        for (from, stage) in stages.iter().enumerate() {
            let name = &stage.name;
            let is_inside = self.has[from];
            if is_inside && stage.is_start {
                let says = format!(
                    "stage {name} lies between {of_fork} and {of_join}, which joins what comes from one \
                     task of {of_fork}, so nothing begins there"
                );
                wrong.push((from, says));
            }
            if is_inside || from == fork {
                continue;
            }
            for edge in &stage.edges {
                let to = &stages[edge.to].name;
                if edge.to == join || self.has[edge.to] {
                    let says = format!(
                        "stage {of_join} joins what comes from one task of {of_fork}, and {name} is not \
                         between them, so {to} cannot take from it"
                    );
                    wrong.push((edge.to, says));
                }
            }
        }
        wrong
    }

    /// What is wrong with two levels that neither lie in each other nor apart.
    fn crosses(&self, other: &Self, stages: &[Stage]) -> Option<Wrong> {
        let (one, two) = (&self.has, &other.has);
        let meets = one.iter().zip(two).any(|(one, two)| *one && *two);
        // Equal levels would each lie in the other: then neither has the fork of the other one.
        let is_fine = match meets {
            true => self.lies_in(other) || other.lies_in(self),
            false => two[self.fork] == two[self.join] && one[other.fork] == one[other.join],
        };
        if is_fine {
            return None;
        }
        let name = |place: usize| &stages[place].name;
        let says = format!(
            "the ways from {} to {} and from {} to {} cross: let one pair lie wholly between the other",
            name(self.fork),
            name(self.join),
            name(other.fork),
            name(other.join)
        );
        Some((self.join.max(other.join), says))
    }

    fn lies_in(&self, other: &Self) -> bool {
        let inside = |place: usize| other.has[place];
        let all = self.has.iter().zip(&other.has);
        all.into_iter().all(|(here, there)| !here || *there)
            && inside(self.fork)
            && inside(self.join)
    }
}

/// The levels around each stage, outermost first, as places among the levels.
fn around(levels: &[Level], stages: usize) -> Vec<Vec<usize>> {
    let size = |level: &usize| levels[*level].has.iter().filter(|has| **has).count();
    let of_stage = |stage: usize| {
        let mut around: Vec<usize> = (0..levels.len())
            .filter(|level| levels[*level].has[stage])
            .collect();
        // The one that lies in another is smaller.
        around.sort_by_key(|level| std::cmp::Reverse(size(level)));
        around
    };
    (0..stages).map(of_stage).collect()
}

fn way(stages: &[Stage], levels: &[Level], around: &[Vec<usize>], from: usize, edge: &Edge) -> Way {
    let is_begun = |level: &Level| {
        let leads = edge.to == level.join || level.has[edge.to];
        level.fork == from && leads
    };
    if let Some(level) = levels.iter().find(|level| is_begun(level)) {
        return Way::Into(number(level.join));
    }
    let depth = around[from].len();
    let stays = match stages[edge.to].join {
        // The depth of what the join waits for.
        Some(_) => around[from]
            .iter()
            .position(|level| levels[*level].join == edge.to)
            .map_or(depth, |place| place + 1),
        None => around[edge.to].len(),
    };
    Way::Out(number(depth.saturating_sub(stays)))
}

fn number(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}
