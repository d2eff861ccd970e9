//! Workflows: definitions, their expressions, and the machine that steps them. All of it is pure:
//! no I/O, no clock.

pub mod definition;
pub mod expression;
pub mod machine;
pub mod program;
