//! The binary: arguments, configuration, run; exit codes.

fn main() {}
