//! Takes the two files of Swagger UI that `/docs/` serves out of the archive of
//! `utoipa-swagger-ui-vendored`.
//!
//! The archive has them compressed with deflate, which is what gzip has between its head and its
//! tail. So taskd holds and serves them as gzip, and nothing unpacks them but the browser.

use std::{env, fs, path::Path};

use utoipa_swagger_ui_vendored::SWAGGER_UI_VENDORED as ARCHIVE;

const FILES: [&str; 2] = ["swagger-ui-bundle.js", "swagger-ui.css"];
/// The head of a gzip file: deflate, no name, no time, of an unknown system.
const GZIP_HEAD: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
/// The method of a zip entry that gzip has, too.
const DEFLATE: usize = 8;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    for name in FILES {
        let gzip =
            entry(name).unwrap_or_else(|| panic!("the archive of Swagger UI has no dist/{name}"));
        fs::write(Path::new(&out).join(format!("{name}.gz")), gzip).expect("OUT_DIR takes files");
    }
}

/// The file of the archive as gzip.
fn entry(name: &str) -> Option<Vec<u8>> {
    let end = ARCHIVE
        .windows(4)
        .rposition(|bytes| bytes == b"PK\x05\x06")?;
    let mut at = number(end + 16, 4);
    for _ in 0..number(end + 10, 2) {
        let (method, packed, name_bytes) =
            (number(at + 10, 2), number(at + 20, 4), number(at + 28, 2));
        let path = &ARCHIVE[at + 46..][..name_bytes];
        if path.ends_with(format!("/dist/{name}").as_bytes()) && method == DEFLATE {
            // The entry has a head of its own, with a name and extras of other lengths.
            let head = number(at + 42, 4);
            let data = head + 30 + number(head + 26, 2) + number(head + 28, 2);
            // Checksum and size, in the order and the form that gzip has them.
            let tail = [&ARCHIVE[at + 16..at + 20], &ARCHIVE[at + 24..at + 28]].concat();
            return Some([&GZIP_HEAD, &ARCHIVE[data..data + packed], &tail].concat());
        }
        at += 46 + name_bytes + number(at + 30, 2) + number(at + 32, 2);
    }
    None
}

/// A little-endian number of the archive.
fn number(at: usize, bytes: usize) -> usize {
    ARCHIVE[at..at + bytes]
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | usize::from(*byte))
}
