//! The binary. Its `main` is in the library, because generic code that the binary instantiates
//! would be compiled a second time.

use std::process::ExitCode;

fn main() -> ExitCode {
    taskd::cli::run()
}
