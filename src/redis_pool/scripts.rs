//! The table of all scripts. A row names the file in `lua/`, the libraries in front of it, whether
//! Redis runs it when its memory is full, and, for a script of a shard, its keys in the order in
//! which it gets them.
//!
//! A script that frees memory, or on which such a script depends, is `at_full_memory` even if it
//! writes. The others are refused then as soon as they write.

use std::sync::LazyLock;

use super::script::{OfShard, Script, ShardKey};

macro_rules! flags {
    (at_full_memory) => {
        "#!lua flags=allow-oom\n"
    };
    (with_room) => {
        ""
    };
}

macro_rules! library {
    ($library:ident) => {
        include_str!(concat!("../../lua/lib/", stringify!($library), ".lua"))
    };
}

/// Libraries that replace a line `-- include lib/NAME.lua` in the middle of a script, inside a
/// branch or a function for a rare case. At the top, every call would pay for making their
/// functions.
const INCLUDED: [(&str, &str); 3] = [
    ("-- include lib/clock.lua", library!(clock)),
    ("-- include lib/record.lua", library!(record)),
    ("-- include lib/held.lua", library!(held)),
];

/// The libraries that only the rows for limited tasks include. In the other rows of these scripts
/// the line stays a comment.
const INCLUDED_IF_LIMITED: [(&str, &str); 2] = [
    ("-- include lib/limits.lua", library!(limits)),
    ("-- include lib/head.lua", library!(head)),
];

fn with_included(text: &str, is_limited: bool) -> String {
    let mut code = String::with_capacity(text.len());
    for line in text.lines() {
        let of_all = INCLUDED.iter();
        let of_limited = INCLUDED_IF_LIMITED.iter().filter(|_| is_limited);
        match of_all
            .chain(of_limited)
            .find(|(include, _)| *include == line.trim())
        {
            Some((_, library)) => code.push_str(&with_included(library, is_limited)),
            None => {
                code.push_str(line);
                code.push('\n');
            }
        }
    }
    code
}

macro_rules! lanes {
    (lanes) => {
        true
    };
    (no_lanes) => {
        false
    };
}

macro_rules! script {
    ($constant:ident, $file:literal, $shard:expr $(, $code:expr)*) => {
        pub static $constant: Script = Script {
            name: $file,
            code: LazyLock::new(|| {
                let of_shard: Option<OfShard> = $shard;
                let is_limited = of_shard.is_some_and(|of| of.keys.contains(&ShardKey::LIMITS));
                with_included(
                    concat!($($code,)* include_str!(concat!("../../lua/", $file, ".lua"))),
                    is_limited,
                )
            }),
            sha: LazyLock::new(|| redis::Script::new(&$constant.code).get_hash().to_owned()),
            of_shard: $shard,
        };
    };
}

macro_rules! table {
    (
        of shards {
            $($of_shard:ident = $file:literal [$($library:ident)*] $memory:ident [$($key:ident)*] $lanes:ident;)*
        }
        others { $($other:ident = $other_file:literal [$($other_library:ident)*] $other_memory:ident;)* }
    ) => {
        $(script!(
            $of_shard, $file,
            Some(OfShard { keys: &[ShardKey::GENERATION, $(ShardKey::$key),*], lanes: lanes!($lanes) }),
            flags!($memory),
            concat!("local GENERATION", $(", ", stringify!($key),)* " = unpack(KEYS)\n")
            $(, library!($library))*
        );)*
        $(script!($other, $other_file, None, flags!($other_memory) $(, library!($other_library))*);)*

        pub static ALL: &[&Script] = &[$(&$of_shard,)* $(&$other),*];
    };
}

table! {
    of shards {
        OPEN = "open" [clock] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS OFFSET UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        CLOSE = "close" [clock shard] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS OFFSET UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        ENQUEUE = "enqueue" [shard body] with_room [RECORDS BODIES DELAYED COUNTERS OFFSET] lanes;
        // For tasks with limit keys. Plain shards get neither its keys nor its code.
        ENQUEUE_LIMITED = "enqueue" [shard body] with_room
            [RECORDS BODIES DELAYED COUNTERS OFFSET LIMITS LINES STARTS CROWDED] lanes;
        // Enqueues no task; only moves the offset past parked ones.
        PASS = "enqueue" [shard body] at_full_memory [RECORDS BODIES DELAYED COUNTERS OFFSET] lanes;
        REWIND = "rewind" [shard] at_full_memory [COUNTERS OFFSET] no_lanes;
        CLAIM = "claim" [shard body] with_room [RECORDS BODIES LEASES COUNTERS OUTBOX UNDELIVERED] lanes;
        CLAIM_AT_FULL_MEMORY = "claim" [shard body] at_full_memory
            [RECORDS BODIES LEASES COUNTERS OUTBOX UNDELIVERED] lanes;
        // Of a shard with limited tasks.
        CLAIM_LIMITED = "claim" [shard body] with_room
            [RECORDS BODIES LEASES COUNTERS OUTBOX UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        CLAIM_LIMITED_AT_FULL_MEMORY = "claim" [shard body] at_full_memory
            [RECORDS BODIES LEASES COUNTERS OUTBOX UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        DELIVERED = "delivered" [shard] at_full_memory [UNDELIVERED] no_lanes;
        COMPLETE = "complete" [clock shard body] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS] no_lanes;
        // Of a shard with limited tasks.
        COMPLETE_LIMITED = "complete" [clock shard body] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS LIMITS LINES STARTS CROWDED] lanes;
        REJECT = "reject" [clock shard many body record lanes held head limits ending] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        SESSION_END = "session_end" [clock shard many body record lanes held head limits ending] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        CANCEL = "cancel" [clock shard many body record lanes held head limits ending] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS LIMITS LINES STARTS CROWDED] lanes;
        DEADLINE = "deadline" [clock shard many body record lanes held head limits ending lost] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS LIMITS LINES STARTS CROWDED] lanes;
        CHANGE = "change" [clock shard many body record lanes held head limits ending lost] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS LIMITS LINES STARTS CROWDED] lanes;
        REQUEUE = "requeue" [clock shard many body record lanes held head limits ending lost] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX LIMITS LINES STARTS CROWDED] lanes;
        CROWDED = "crowded" [shard body limits] at_full_memory [RECORDS BODIES COUNTERS LIMITS LINES STARTS CROWDED] lanes;
        EXTEND = "extend" [clock shard record held] at_full_memory
            [RECORDS BODIES LEASES COUNTERS UNDELIVERED] no_lanes;
        EXPIRE = "expire" [clock shard many body lease record lanes held head limits ending] at_full_memory
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        PROMOTE = "promote" [clock shard many body record lanes held head limits ending] at_full_memory
            [RECORDS BODIES DELAYED COUNTERS LIMITS LINES STARTS CROWDED] lanes;
        OWN_LIMITS = "own_limits" [clock shard body limits] at_full_memory
            [RECORDS BODIES COUNTERS LIMITS LINES STARTS CROWDED] lanes;
        LIMIT_KEYS = "limit_keys" [clock shard body head limits] with_room
            [RECORDS BODIES COUNTERS LIMITS LINES STARTS CROWDED] lanes;
        HOLDS = "holds" [shard] at_full_memory [COUNTERS LINES] no_lanes;
        SWEEP = "sweep" [shard many record lanes] at_full_memory [RECORDS BODIES COUNTERS] lanes;
        LOOK = "look" [clock shard record lanes] with_room
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS UNDELIVERED LIMITS STARTS] lanes;
        PEEK = "peek" [shard lanes] with_room [] lanes;
        INSPECT = "inspect" [shard many record] with_room [RECORDS BODIES OFFSET] no_lanes;
        MISSING = "missing" [shard many record] with_room [RECORDS BODIES OFFSET] no_lanes;
        EXPLAIN = "explain" [clock shard body lease record lanes head limits] with_room
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX OFFSET UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        STATS = "stats" [shard record lanes] with_room
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS LIMITS CROWDED] lanes;
        WORKERS = "workers" [shard record] with_room [RECORDS BODIES LEASES] no_lanes;
        BOOKS = "books" [shard lanes] with_room [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS] lanes;
        CHECK = "check" [clock shard many body lease record lanes head limits ending drop] with_room
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS LIMITS LINES STARTS CROWDED] lanes;
        CHECK_ORDER = "check_order" [shard lanes] with_room [FINALS] lanes;
        CHECK_TASK = "check_task" [clock shard many body record lanes head limits ending drop] with_room
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS LIMITS LINES STARTS CROWDED] lanes;
        RECOUNT = "recount" [clock shard many body record lanes head limits ending] with_room
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS LIMITS LINES STARTS CROWDED] lanes;
        DUMP = "dump" [clock shard record lanes] with_room
            [RECORDS BODIES LEASES DELAYED COUNTERS OUTBOX FINALS OFFSET UNDELIVERED LIMITS LINES STARTS CROWDED] lanes;
        FINALS = "finals" [clock shard] at_full_memory [RECORDS FINALS] no_lanes;
        FORGET = "forget" [clock shard] at_full_memory [RECORDS COUNTERS FINALS] no_lanes;
        OUTBOX = "outbox" [clock shard] at_full_memory [COUNTERS OUTBOX] no_lanes;
        OUTBOX_EXTENT = "outbox_extent" [shard] with_room [OUTBOX] no_lanes;
        FORWARDED = "forwarded" [shard many] at_full_memory [COUNTERS OUTBOX] no_lanes;
    }
    others {
        LEASE = "lease" [clock] at_full_memory;
        EPOCH = "epoch" [] at_full_memory;
        FEED_TAKE = "feed_take" [] with_room;
        NAME = "name" [] at_full_memory;
        TIME = "time" [clock] with_room;
        SHARED_OPEN = "shared_open" [clock shared] at_full_memory;
        SHARED_CALL = "shared_call" [clock shared] at_full_memory;
        SHARED_HOLD = "shared_hold" [clock shared] at_full_memory;
        SHARED_NOTE = "shared_note" [clock shared] at_full_memory;
        SHARED_END = "shared_end" [clock shared] at_full_memory;
        SHARED_FORGET = "shared_forget" [clock shared] at_full_memory;
        SHARED_DUE = "shared_due" [clock] at_full_memory;
        SHARED_ALLOT = "shared_allot" [clock] at_full_memory;
        SHARED_LIVE = "shared_live" [clock] at_full_memory;
        SHARED_GONE = "shared_gone" [clock] at_full_memory;
        FILTER_BITS = "filter_bits" [] with_room;
        FILTER_MARK = "filter_mark" [] with_room;
        FILTER_DROP = "filter_drop" [] with_room;
        // A call that waits for replicas may be one that frees memory.
        WAITED = "waited" [] at_full_memory;
        BUS_BEGIN = "bus_begin" [] at_full_memory;
        BUS_COMMIT = "bus_commit" [] at_full_memory;
        BUS_EXTENT = "bus_extent" [] with_room;
        BUS_GROUP = "bus_group" [] at_full_memory;
        BUS_OWN = "bus_own" [clock] at_full_memory;
        BUS_PUBLISH = "bus_publish" [] at_full_memory;
        BUS_TAKE_OVER = "bus_take_over" [clock] at_full_memory;
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::*;

    fn lua(file: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("lua").join(file);
        without_comments(&std::fs::read_to_string(&path).expect("a script"))
    }

    fn without_comments(text: &str) -> String {
        text.lines()
            .map(|line| line.split("--").next().unwrap_or_default().to_owned() + "\n")
            .collect()
    }

    fn words(text: &str) -> BTreeSet<&str> {
        text.split(|c: char| !c.is_alphanumeric() && c != '_')
            .collect()
    }

    #[test]
    fn a_script_gets_the_keys_that_it_names() {
        let all = OPEN.of_shard().expect("of a shard").keys;
        for script in ALL {
            let Some(OfShard { keys, lanes }) = script.of_shard() else {
                continue;
            };
            let text = lua(&format!("{}.lua", script.name));
            let words = words(&text);
            for key in all {
                let is_named = words.contains(format!("{key:?}").as_str());
                assert!(
                    !is_named || keys.contains(key),
                    "{} names {key:?}",
                    script.name
                );
            }
            let counts = words.contains("count") && text.contains("count('");
            assert!(
                !counts || keys.contains(&ShardKey::COUNTERS),
                "{} counts",
                script.name
            );
            let names_lanes = ["T", "C", "P", "lane_of"]
                .iter()
                .any(|name| words.contains(name));
            assert!(!names_lanes || lanes, "{} names lanes", script.name);
        }
    }

    #[test]
    fn a_script_names_the_keys_that_it_gets() {
        let all = OPEN.of_shard().expect("of a shard").keys;
        for script in ALL {
            // A script that gets all keys may iterate over them.
            let Some(OfShard { keys, .. }) =
                script.of_shard().filter(|of| of.keys.len() < all.len())
            else {
                continue;
            };
            let code = without_comments(&script.code);
            let names_given = |line: &&str| !line.starts_with("local GENERATION");
            let code: Vec<_> = code.lines().filter(names_given).collect();
            let code = code.join("\n");
            let words = words(&code);
            for key in keys {
                assert!(
                    words.contains(format!("{key:?}").as_str()),
                    "{} does not name {key:?}",
                    script.name
                );
            }
        }
    }

    #[test]
    fn every_file_is_in_the_table() {
        let files =
            std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("lua")).expect("lua");
        let files = files.map(|file| {
            file.expect("a file")
                .file_name()
                .to_string_lossy()
                .into_owned()
        });
        let names: BTreeSet<_> = files
            .filter_map(|file| file.strip_suffix(".lua").map(str::to_owned))
            .collect();
        assert_eq!(
            names,
            ALL.iter().map(|script| script.name.to_owned()).collect()
        );
    }
}
