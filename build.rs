//! What is compiled in besides the source (two files of Swagger UI, and the commit), and how a
//! release is linked.
//!
//! `/docs/` serves the files, which come from the archive in `utoipa-swagger-ui-vendored`. There
//! they are compressed with deflate, which is also the body of a gzip file. So taskd stores and
//! serves them as gzip, and only the browser decompresses them.
//!
//! `BUILD_COMMIT` and `BUILD_VERSION` say what a release was built from. A debug build does not
//! know its commit.

use std::{env, fs, path::Path, process::Command};

use utoipa_swagger_ui_vendored::SWAGGER_UI_VENDORED as ARCHIVE;

const FILES: [&str; 2] = ["swagger-ui-bundle.js", "swagger-ui.css"];
/// A gzip header: deflate, no name, no time, unknown operating system.
const GZIP_HEAD: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
/// The compression method of zip entries that gzip also uses.
const DEFLATE: usize = 8;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    for name in FILES {
        let gzip =
            entry(name).unwrap_or_else(|| panic!("the archive of Swagger UI has no dist/{name}"));
        fs::write(Path::new(&out).join(format!("{name}.gz")), gzip).expect("OUT_DIR takes files");
    }
    let version = env::var("CARGO_PKG_VERSION").expect("cargo sets CARGO_PKG_VERSION");
    let commit = commit().unwrap_or_default();
    let version = if commit.is_empty() {
        version
    } else {
        format!("{version} (commit {commit})")
    };
    println!("cargo::rustc-env=BUILD_COMMIT={commit}");
    println!("cargo::rustc-env=BUILD_VERSION={version}");
    if links_with_lld() {
        // Keeps functions that are the same machine code once. Nothing here compares functions.
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    }
}

/// True if rustc links a release with the lld that its toolchain has, which it does on this target
/// unless somebody names another linker.
fn links_with_lld() -> bool {
    let of = |name: &str| env::var(name).unwrap_or_default();
    if of("PROFILE") != "release" || of("TARGET") != "x86_64-unknown-linux-gnu" {
        return false;
    }
    if env::var_os("RUSTC_LINKER").is_some() || of("CARGO_ENCODED_RUSTFLAGS").contains("link") {
        return false;
    }
    let rustc = Command::new(of("RUSTC"))
        .args(["--print", "sysroot"])
        .output();
    rustc.is_ok_and(|rustc| {
        let sysroot = String::from_utf8_lossy(&rustc.stdout).trim().to_owned();
        Path::new(&sysroot)
            .join("lib/rustlib/x86_64-unknown-linux-gnu/bin/gcc-ld/ld.lld")
            .exists()
    })
}

/// The first twelve digits of the commit, with a plus if files differ from it. It comes from the
/// variable `SOURCE_COMMIT` (for source archives without a repository), from git, or from the file
/// that cargo adds to a package.
fn commit() -> Option<String> {
    println!("cargo::rerun-if-env-changed=SOURCE_COMMIT");
    if let Ok(commit) = env::var("SOURCE_COMMIT") {
        return short(&commit);
    }
    if env::var("PROFILE").as_deref() != Ok("release") {
        return None;
    }
    of_git().or_else(of_package)
}

fn of_git() -> Option<String> {
    let root = env::var("CARGO_MANIFEST_DIR").ok()?;
    let root = fs::canonicalize(root).ok()?;
    // An unpacked archive of this source may lie inside another repository.
    if fs::canonicalize(git(&["rev-parse", "--show-toplevel"])?).ok()? != root {
        return None;
    }
    // Rerun only for these files, because a change of them recompiles taskd anyway: a commit of
    // documents is not worth a build of ten minutes. The price: what was built before a commit
    // keeps its plus after it.
    for read in [
        "Cargo.lock",
        "Cargo.toml",
        "clients/rust/src",
        "crates/taskd-proto/src",
        "lua",
        "migrations",
        "src",
    ] {
        println!("cargo::rerun-if-changed={read}");
    }
    let commit = short(&git(&["rev-parse", "HEAD"])?)?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() {
        commit
    } else {
        commit + "+"
    })
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// The commit in `.cargo_vcs_info.json`: `{"git": {"sha1": "…"}, …}`.
fn of_package() -> Option<String> {
    let info = fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let (_, rest) = info.split_once("\"sha1\"")?;
    short(rest.split('"').nth(1)?)
}

/// The first twelve digits of a commit, or `None` if it is not one.
fn short(commit: &str) -> Option<String> {
    let digits = commit.trim();
    let is_hex = digits.len() >= 12 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| digits[..12].to_owned())
}

/// Extracts a file of the archive, as gzip.
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
            // The entry has a local header of its own, in which the name and the extra field can
            // differ in length.
            let head = number(at + 42, 4);
            let data = head + 30 + number(head + 26, 2) + number(head + 28, 2);
            // Checksum and size, in the order and format of gzip.
            let tail = [&ARCHIVE[at + 16..at + 20], &ARCHIVE[at + 24..at + 28]].concat();
            return Some([&GZIP_HEAD, &ARCHIVE[data..data + packed], &tail].concat());
        }
        at += 46 + name_bytes + number(at + 30, 2) + number(at + 32, 2);
    }
    None
}

/// Reads a little-endian number of the archive.
fn number(at: usize, bytes: usize) -> usize {
    ARCHIVE[at..at + bytes]
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | usize::from(*byte))
}
