//! Random configuration files: one that is refused gets one line, and one that is accepted is
//! printed as a file that says the same.

use std::fs;

use proptest::{collection::vec, prelude::*, sample::Index};

use super::{
    load::load,
    options::Options,
    origins::Origins,
    properties::{Properties, Rules},
    show::to_toml,
};

const RULES: Rules = Rules {
    mistake: |_: &Properties| None,
    is_secret: |_| false,
};

/// A file with sections, and the sample with all settings.
const FILES: [&str; 2] = [
    r#"pipelines = ["tasks", "fanout"]
max_items = 7
bus_url = "kafka://h:9092"
allowed_hosts = ["a", "b"]
[kafka]
sasl.username = "u"
"linger.ms" = 5
[queues.crawl]
lease = "1500ms"
backoff = ["1s", "2s"]
[queues.default]
priority = "low"
"#,
    include_str!("../../taskd.toml"),
];

/// Lines are cut out, doubled or damaged.
#[derive(Clone, Debug)]
enum Damage {
    CutLine(Index),
    DoubleLine(Index, Index),
    Write(Index, Vec<u8>),
}

impl Damage {
    fn apply(&self, text: &mut Vec<u8>) {
        let mut lines: Vec<Vec<u8>> = text
            .split(|byte| *byte == b'\n')
            .map(<[u8]>::to_vec)
            .collect();
        match self {
            Self::CutLine(at) => drop(lines.remove(at.index(lines.len()))),
            Self::DoubleLine(at, to) => {
                let line = lines[at.index(lines.len())].clone();
                lines.insert(to.index(lines.len() + 1), line);
            }
            Self::Write(at, bytes) => {
                let at = at.index(text.len() + 1);
                text.splice(at..text.len().min(at + 1), bytes.iter().copied());
                return;
            }
        }
        *text = lines.join(&b'\n');
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let signs = prop::sample::select(&b"[]{}=\"'\\,.#\n\0\xff0-9e_ tTmsiB"[..]);
    prop_oneof![
        any::<Index>().prop_map(Damage::CutLine),
        (any::<Index>(), any::<Index>()).prop_map(|(at, to)| Damage::DoubleLine(at, to)),
        (any::<Index>(), vec(signs, 0..4)).prop_map(|(at, bytes)| Damage::Write(at, bytes)),
    ]
}

fn files() -> impl Strategy<Value = Vec<u8>> {
    let damaged =
        (prop::sample::select(&FILES[..]), vec(damage(), 0..4)).prop_map(|(file, damages)| {
            let mut text = file.as_bytes().to_vec();
            damages.iter().for_each(|damage| {
                if !text.is_empty() {
                    damage.apply(&mut text)
                }
            });
            text
        });
    prop_oneof![1 => vec(any::<u8>(), 0..64), 9 => damaged]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn files_of_any_kind_are_read_or_refused_in_one_line(file in files()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.toml");
        let read = |text: &[u8]| {
            fs::write(&path, text).unwrap();
            let flags = Options { config: Some(path.clone()), ..Options::default() };
            load(flags, Origins::default(), RULES, |_| None).map_err(|error| error.to_string())
        };
        match read(&file) {
            Ok(loaded) => {
                let printed = to_toml(&loaded.settings, &loaded.origins, RULES.is_secret);
                prop_assert_eq!(read(printed.as_bytes()).map(|again| again.settings), Ok(loaded.settings));
            }
            Err(error) => prop_assert!(error.lines().count() == 1, "{error:?}"),
        }
    }
}
