//! The workers in Rust of the pages, as programs: a test starts this test binary again to run one
//! of them.

/// The variable that has the address of taskd's gRPC for such a program.
pub(super) const ADDRESS: &str = "DOCS_TASKD_ADDRESS";

/// The name of the test that is the worker of a page, whose code must be the one that is printed.
pub(super) fn worker(page: &str, printed: &str) -> &'static str {
    let (name, compiled) = match page {
        "README.md" => ("docs::rust::worker_of_readme", include_str!("of_readme.rs")),
        "docs/workers.md" => (
            "docs::rust::worker_of_workers",
            include_str!("of_workers.rs"),
        ),
        page => panic!("tests/it/docs/rust.rs has no worker of {page}"),
    };
    assert_eq!(
        printed, compiled,
        "copy the block of {page} into tests/it/docs"
    );
    name
}

/// The crate, whose clients go to the taskd of the test instead of the printed address.
mod here {
    pub(super) use ::taskd_client::*;

    pub(super) struct Client;

    impl Client {
        #[expect(
            clippy::new_ret_no_self,
            reason = "it stands for the client of the crate"
        )]
        pub(super) fn new(printed: &str) -> Result<::taskd_client::Client, Error> {
            assert_eq!(printed, "http://127.0.0.1:7601");
            ::taskd_client::Client::new(std::env::var(super::ADDRESS).unwrap())
        }
    }
}

mod of_readme {
    use super::here as taskd_client;

    include!("of_readme.rs");

    pub(super) fn run() {
        main().unwrap();
    }
}

mod of_workers {
    use super::here as taskd_client;

    include!("of_workers.rs");

    pub(super) fn run() {
        main().unwrap();
    }
}

#[test]
#[ignore = "a worker that other tests start"]
fn worker_of_readme() {
    if std::env::var_os(ADDRESS).is_some() {
        of_readme::run();
    }
}

#[test]
#[ignore = "a worker that other tests start"]
fn worker_of_workers() {
    if std::env::var_os(ADDRESS).is_some() {
        of_workers::run();
    }
}
