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
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds {
            fuel: 20_000,
            memory: 64 << 20,
            output: 4 << 20,
        }
    }
}

impl Bounds {
    /// Takes from the bound of the output.
    pub(super) fn spend(&mut self, bytes: usize) -> Result<(), Error> {
        self.output = self.output.checked_sub(bytes).ok_or(Error::Output)?;
        Ok(())
    }
}
