//! Random answers of endpoints: each has a verdict per task, or is refused in one line.

use proptest::{collection::vec, prelude::*, sample::Index};

use super::json::{Verdict, answer};

const ANSWERS: [&str; 2] = [
    r#"{"tasks": [{"headers": {"site": "a", "h": "\u00e9"}, "priority": "high", "payload": {"n": 1.50}}, {}]}"#,
    r#"{"tasks": [{"reject": "no\nluck"}, {"payload_base64": "AP8="}]}"#,
];

fn answers() -> impl Strategy<Value = Vec<u8>> {
    let signs = prop::sample::select(&b"{}[]\":,\\\0\xff0-9eE.u "[..]);
    let change = (any::<Index>(), 0..8_usize, vec(signs, 0..4));
    let damaged =
        (prop::sample::select(&ANSWERS[..]), vec(change, 0..4)).prop_map(|(sample, changes)| {
            let mut text = sample.as_bytes().to_vec();
            for (at, length, bytes) in changes {
                let at = at.index(text.len() + 1);
                text.splice(at..text.len().min(at + length), bytes);
            }
            text
        });
    prop_oneof![1 => vec(any::<u8>(), 0..64), 9 => damaged]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn answers_of_any_kind_are_read_or_refused(text in answers()) {
        match answer(&text, 2) {
            Ok(verdicts) => {
                prop_assert_eq!(verdicts.len(), 2);
                for verdict in verdicts {
                    match verdict {
                        Ok(Verdict::Reject(reason)) => prop_assert!(!reason.contains(char::is_control)),
                        Ok(Verdict::Change(_)) => {}
                        Err(why) => prop_assert!(why.lines().count() <= 1 && why.len() < text.len() + 300, "{why:?}"),
                    }
                }
            }
            Err(why) => prop_assert!(why.lines().count() <= 1 && why.len() < text.len() + 300, "{why:?}"),
        }
    }
}
