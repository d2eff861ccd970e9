//! The ways of outputs through the levels of joins.

/// The most levels that lie in each other.
pub const MOST_LEVELS: usize = 32;

/// Where an output goes, seen from the level of the task that sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// So many levels out; 0: it stays in the subtree of the task. Beyond the outermost one it is in
    /// no subtree.
    Out(u32),
    /// Into the subtree of the join that has this place in [`Joining::joins`](super::Joining::joins).
    Into(u32),
}

impl Default for Way {
    fn default() -> Self {
        Self::Out(0)
    }
}

impl Way {
    /// Out of all levels.
    pub const TOP: Self = Self::Out(MOST_LEVELS as u32);

    /// The number in the record of a report.
    pub fn number(self) -> u32 {
        match self {
            Self::Out(levels) => levels.min(MOST_LEVELS as u32),
            Self::Into(place) => MOST_LEVELS as u32 + 1 + place,
        }
    }

    pub fn from_number(number: u32) -> Self {
        match number.checked_sub(MOST_LEVELS as u32 + 1) {
            None => Self::Out(number),
            Some(place) => Self::Into(place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_read_as_it_was_written() {
        for way in [
            Way::Out(0),
            Way::Out(3),
            Way::TOP,
            Way::Into(0),
            Way::Into(7),
        ] {
            assert_eq!(Way::from_number(way.number()), way);
        }
    }
}
