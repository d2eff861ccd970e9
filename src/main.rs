//! The binary. The library contains its `main`: generic code that the binary instantiates would be
//! compiled twice.

use std::process::ExitCode;

fn main() -> ExitCode {
    taskd::cli::run()
}
