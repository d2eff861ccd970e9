//! The status of a task.

/// The status stored in SQL, which stores the discriminants. Whether an unfinished task is queued,
/// assigned or delayed is known only to Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum StoredStatus {
    Unfinished = 0,
    Completed = 1,
    Dead = 2,
    Cancelled = 3,
}

impl StoredStatus {
    pub const ALL: [Self; 4] = [
        Self::Unfinished,
        Self::Completed,
        Self::Dead,
        Self::Cancelled,
    ];

    /// The status for a number stored in SQL.
    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|s| *s as i64 == number)
    }

    pub fn is_final(self) -> bool {
        self != Self::Unfinished
    }
}
