//! The archives of a release, made of the taskd of the tests.

use std::{
    collections::BTreeSet,
    env, fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const TASKD: &str = env!("CARGO_BIN_EXE_taskd");

/// Runs a program that must succeed, and returns what it printed.
fn run(command: &mut Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}\n{said}");
    String::from_utf8(stdout).unwrap()
}

fn unpack(archive: &Path, into: &Path) {
    let mut tar = Command::new("tar");
    run(tar.arg("-xzf").arg(archive).arg("-C").arg(into));
}

fn sections(file: &Path) -> String {
    run(Command::new("readelf")
        .args(["--sections", "--wide"])
        .arg(file))
}

#[test]
fn the_archives_of_a_release_have_all_that_belongs_to_it() {
    let mut python = Command::new("python3");
    python.args(["-c", "import tomllib, datetime; datetime.UTC"]);
    if !python.output().is_ok_and(|output| output.status.success()) {
        eprintln!("left out: scripts/third-party needs Python 3.11 or newer");
        return;
    }
    let tmp = tempfile::Builder::new()
        .prefix("taskd-dist-")
        .tempdir_in("/tmp")
        .unwrap();
    let made = tmp.path().join("made");
    let mut dist = Command::new(Path::new(ROOT).join("scripts/dist"));
    dist.args(["--binary", TASKD, "--to"]).arg(&made);
    run(dist
        .env("DIST_GZIP_LEVEL", "1")
        .env("SOURCE_DATE_EPOCH", "1700000000"));

    let files: BTreeSet<String> = fs::read_dir(&made)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let sums = fs::read_to_string(made.join("SHA256SUMS")).unwrap();
    assert_eq!(files.len(), 4, "{files:?}");
    assert_eq!(sums.lines().count(), 3, "{sums}");
    let mut check = Command::new("sha256sum");
    run(check
        .args(["--check", "--strict", "SHA256SUMS"])
        .current_dir(&made));

    let debug = files
        .iter()
        .find(|name| name.ends_with("-debug.tar.gz"))
        .expect("the symbols have an archive");
    let name = debug.strip_suffix("-debug.tar.gz").unwrap();
    unpack(&made.join(format!("{name}.tar.gz")), tmp.path());
    unpack(&made.join(debug), tmp.path());
    let folder = tmp.path().join(name);
    let taskd = folder.join("taskd");
    for file in [
        "CHANGELOG.md",
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "README.md",
        "completions/_taskd",
        "completions/taskd.bash",
        "completions/taskd.fish",
        "man/man1/taskd-work.1",
        "man/man1/taskd.1",
        "taskd.toml",
    ] {
        let length = fs::metadata(folder.join(file)).map_or(0, |file| file.len());
        assert!(length > 0, "{file} is missing or empty");
    }

    // It runs without its symbols, and names the file that has them.
    let version = run(Command::new(&taskd).arg("--version"));
    assert_eq!(version.trim(), concat!("taskd ", env!("BUILD_VERSION")));
    let stripped = sections(&taskd);
    assert!(stripped.contains(" .gnu_debuglink "), "{stripped}");
    assert!(!stripped.contains(" .symtab "), "{stripped}");
    let symbols = sections(&tmp.path().join(format!("{name}-debug/taskd.debug")));
    assert!(symbols.contains(" .symtab "), "{symbols}");
    assert!(symbols.contains(" .debug_line "), "{symbols}");

    // Each crate of the bill of materials has its licence in the archive.
    let bill = fs::read(folder.join("taskd.cdx.json")).unwrap();
    let bill: Value = serde_json::from_slice(&bill).unwrap();
    assert_eq!(bill["bomFormat"], "CycloneDX");
    assert_eq!(bill["metadata"]["timestamp"], "2023-11-14T22:13:20Z");
    assert_eq!(bill["metadata"]["component"]["name"], "taskd");
    let components = bill["components"].as_array().unwrap();
    let licences = fs::read_to_string(folder.join("THIRD-PARTY-LICENSES.txt")).unwrap();
    let mut refs: BTreeSet<&str> = BTreeSet::new();
    for component in components {
        let [name, version] = ["name", "version"].map(|field| component[field].as_str().unwrap());
        refs.insert(component["bom-ref"].as_str().unwrap());
        if name.starts_with("taskd") {
            continue;
        }
        let line = format!("\n{name} {version}: ");
        assert!(licences.contains(&line), "{name} has no licence");
        let checksum = component["hashes"][0]["content"].as_str().unwrap();
        assert_eq!(checksum.len(), 64, "{component}");
    }
    for wanted in [
        "librdkafka",
        "Zstandard",
        "zlib",
        "Permission is hereby granted",
    ] {
        assert!(licences.contains(wanted), "no licence has {wanted}");
    }
    for (name, is_in) in [
        ("tokio", true),
        ("rdkafka-sys", true),
        ("utoipa-swagger-ui-vendored", true),
        // Only the tests use them.
        ("proptest", false),
        ("reqwest", false),
    ] {
        let found = components.iter().any(|component| component["name"] == name);
        assert_eq!(found, is_in, "{name}");
    }
    let dependencies = bill["dependencies"].as_array().unwrap();
    assert_eq!(dependencies.len(), components.len() + 1);
    for needed in dependencies
        .iter()
        .flat_map(|one| one["dependsOn"].as_array().unwrap())
    {
        assert!(
            refs.contains(needed.as_str().unwrap()),
            "{needed} is no component"
        );
    }
}
