//! What an evaluation may use.

use super::Error;

/// What one evaluation may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// How many calls of definitions and rounds of loops. The work of built-in functions is bounded
    /// in proportion.
    pub fuel: u64,
    /// How many bytes the values that are alive at a time may take.
    pub memory: usize,
    /// How many bytes the result may have as JSON.
    pub output: usize,
    /// The work of all evaluations with these bounds together. A unit takes about a nanosecond.
    pub work: u64,
}

/// Work of built-in functions per unit of fuel: a byte copied, a quarter of an element.
pub(super) const WORK_PER_FUEL: u64 = 2_048;

/// How many evaluations that use all of their fuel fit into [`Bounds::work`].
const EVALUATIONS: u64 = 50;

impl Bounds {
    pub fn new(fuel: u64, memory: usize, output: usize) -> Bounds {
        Bounds {
            fuel,
            memory,
            output,
            work: fuel.saturating_mul(WORK_PER_FUEL * EVALUATIONS),
        }
    }
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds::new(20_000, 64 << 20, 4 << 20)
    }
}

impl Bounds {
    /// Takes from the bound of the output.
    pub(super) fn spend(&mut self, bytes: usize) -> Result<(), Error> {
        self.output = self.output.checked_sub(bytes).ok_or(Error::Output)?;
        Ok(())
    }
}
