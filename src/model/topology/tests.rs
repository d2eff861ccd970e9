use bytes::Bytes;
use serde_json::json;

use super::*;
use crate::model::{Completion, Encoding, TaskId, TaskTree};

const CRAWL: &str = r#"
name = "crawl"
max_open = 1000
on_dead = "hold"
timeout = "1h"
then = "reports"

[stage.fetch]
start = true
from = "parse.link"
loop = true
lease = "2m"
max_attempts = 4
backoff = { kind = "exponential", initial = "1s" }
priority = "low"
command = ["python3", "fetch.py"]
on_start = ["true"]
on_stop = ["true"]

[stage.parse]
from = "fetch"
ports = ["page", "link"]

[stage.index]
from = "parse.page"

[stage.screenshot]
from = [{ stage = "parse.page", match = { "/lang" = ["en", "de"], "kind" = "html" } }]
"#;

fn crawl() -> Topology {
    Topology::read(CRAWL).unwrap()
}

fn mistakes(text: &str) -> Vec<String> {
    let mistakes = Topology::read(text).expect_err(text);
    mistakes.iter().map(ToString::to_string).collect()
}

/// The topology `t` with these lines.
fn wrong(lines: &str) -> String {
    let mistakes = mistakes(&format!("name = \"t\"\n{lines}"));
    mistakes.join("\n")
}

#[test]
fn a_file_becomes_stages_and_edges() {
    let crawl = crawl();
    assert_eq!(crawl.name.as_str(), "crawl");
    assert_eq!(crawl.then, "reports");
    assert_eq!(crawl.on_dead, TreeOnDead::Hold);
    assert_eq!(crawl.timeout, Some(Duration::from_secs(3600)));
    assert_eq!(crawl.max_open, 1000);
    let names: Vec<_> = crawl.stages.iter().map(|stage| &*stage.name).collect();
    assert_eq!(names, ["fetch", "parse", "index", "screenshot"]);
    let [fetch, parse, index, _] = &crawl.stages[..] else {
        panic!("{crawl:?}");
    };
    assert!(fetch.is_start && !parse.is_start);
    assert_eq!(fetch.queue.as_str(), "crawl.fetch");
    assert_eq!(fetch.lease, Some(Duration::from_secs(120)));
    assert_eq!(fetch.max_attempts, Some(4));
    assert_eq!(fetch.priority, Some(Priority::Low));
    assert_eq!(fetch.command, ["python3", "fetch.py"]);
    assert_eq!(fetch.ports, ["out"]);
    assert_eq!(index.edges, []);
    let edges: Vec<_> = parse
        .edges
        .iter()
        .map(|edge| (&*edge.port, edge.to, edge.goes_back))
        .collect();
    assert_eq!(
        edges,
        [("link", 0, true), ("page", 2, false), ("page", 3, false)]
    );
    assert_eq!(crawl.notes.len(), 1);
    assert_eq!((crawl.notes[0].line, crawl.notes[0].column), (10, 8));
}

#[test]
fn every_mistake_is_named_with_its_place() {
    for (lines, said) in [
        ("", "1:1: there is no stage"),
        ("[stage]", "1:1: there is no stage"),
        ("[stage.a]\nstart = maybe", "3:9: "),
        (
            "[stage.a]\n[stage.b]\n[stage.a]",
            "4:8: this name is there already",
        ),
        ("[stage.a]\nlease = 5", "3:9: lease must be a duration"),
        (
            "[stage.a]\nlease = \"1ms\"",
            "3:9: lease must be at least 100ms",
        ),
        (
            "[stage.a]\nmax_attempts = 0",
            "3:16: max_attempts must be a number",
        ),
        (
            "[stage.a]\npriority = \"urgent\"",
            "3:12: priority is \"urgent\"",
        ),
        (
            "[stage.a]\nbackoff = { kind = \"square\" }",
            "3:20: kind is \"square\"",
        ),
        (
            "[stage.a]\nbackoff = { kind = \"linear\" }",
            "backoff.initial is missing",
        ),
        (
            "[stage.a]\nbackoff = { initial = \"1s\", jutter = 1 }",
            "unknown key \"jutter\"",
        ),
        (
            "[stage.a]\ncommand = \"python3\"",
            "3:11: command must be a list of texts",
        ),
        (
            "[stage.a]\nlaese = \"1s\"",
            "3:1: unknown key \"laese\"; expected from,",
        ),
        ("[stage.a]\njoin = 1", "3:8: join must be a text"),
        (
            "[stage.a]\n[[test]]\nname = \"x\"",
            "3:1: input is missing: input = [{ key = \"…\" }]",
        ),
        (
            "[stage.a]\n[[test]]\nname = \"x\"\ninput = [{ key = \"k\" }]\nworkers.a = 7",
            "6:13: a worker is a list of outputs, \"fail\", or a table of these by key",
        ),
        (
            "[stage.a]\n[[test]]\nname = \"x\"\ninput = [{ key = \"k\" }]\nexpect.a.cuont = 7",
            "6:10: unknown key \"cuont\"; expected count, dead",
        ),
        (
            "[stage.a]\ntopic = \"events\"",
            "3:9: topic \"events\" is one of taskd's own",
        ),
        (
            "[stage.a]\ntopic = \"b\"\nports = [\"x\"]",
            "4:1: taskd itself works on a stage with a topic: leave out ports",
        ),
        (
            "[stage.a]\ntopic = \"b\"\n[stage.c]\nfrom = \"a\"",
            "5:8: stage a publishes into topic b and has no outputs",
        ),
        (
            "max_open = -1\n[stage.a]",
            "2:12: max_open must be a number from 0 to 100000",
        ),
        ("retries = 5\n[stage.a]", "2:1: unknown key \"retries\""),
        ("[stage.\"a.b\"]", "2:8: stage \"a.b\": a name has"),
        (
            "[stage.a]\nports = [\"x y\"]",
            "3:10: port \"x y\": a name has",
        ),
        (
            "[stage.a]\nports = [\"x\", \"x\"]",
            "3:15: port \"x\" is there already",
        ),
        (
            "[stage.a]\nports = [\"x\"]",
            "3:10: nobody takes port x of stage a",
        ),
        (
            "[stage.a]\n[stage.b]\nfrom = \"c\"",
            "4:8: there is no stage \"c\"",
        ),
        (
            "[stage.a]\n[stage.b]\nfrom = \"a.x\"",
            "4:8: stage a has no port \"x\"; it has out",
        ),
        (
            "[stage.a]\n[stage.b]\nfrom = [\"a\", \"a\"]",
            "4:14: a.out is there already",
        ),
        ("[stage.a]\n[stage.b]\nfrom = []", "4:8: from is empty"),
        ("[stage.a]\n[stage.b]\nfrom = 5", "4:8: from must be"),
        (
            "[stage.a]\n[stage.b]\nfrom = { match = {} }",
            "4:8: stage is missing",
        ),
        (
            "[stage.a]\n[stage.b]\nfrom = { stage = \"a\", match = { x = [] } }",
            "4:31: match: \"x\" has no values",
        ),
        (
            "[stage.a]\nstart = true\nfrom = \"b\"\n[stage.b]\nfrom = \"a\"",
            "4:8: stages a, b are a cycle",
        ),
        (
            "[stage.a]\nloop = true",
            "3:1: no way leads from stage a back to a",
        ),
        (
            "[stage.a]\nfrom = \"a\"\nloop = true",
            "2:8: no stage has start = true",
        ),
        (
            "[stage.a]\n[stage.b]\nfrom = \"b\"\nloop = true",
            "3:8: no way leads from a start to stage b",
        ),
        ("on_dead = \"next\"\n[stage.a]", "2:11: on_dead is \"next\""),
        ("timeout = \"0s\"\n[stage.a]", "2:11: timeout must be 1ms"),
        (
            "then = \"a b\"\n[stage.a]",
            "2:8: then: queue \"a b\" contains",
        ),
        (
            "then = \"t.a\"\n[stage.a]",
            "2:8: then is \"t.a\", a stage of this topology",
        ),
    ] {
        let wrong = wrong(lines);
        assert!(wrong.contains(said), "{lines}\n{wrong}\nshould say {said}");
    }
    assert!(mistakes("[stage.a]")[0].starts_with("1:1: name is missing"));
    assert!(mistakes("name = \"a b\"\n[stage.a]")[0].starts_with("1:8: topology \"a b\""));
    let all = wrong("[stage.a]\nlease = 5\njoin = \"x\"\nfrom = \"c\"");
    assert_eq!(all.lines().count(), 4, "{all}");
}

#[test]
fn a_topology_has_bounds() {
    let stages: String = (0..65).map(|n| format!("[stage.s{n}]\n")).collect();
    assert!(wrong(&stages).contains("the topology has 65 stages; at most 64"));
    let mut edges = String::new();
    for to in 0..33 {
        let from: Vec<String> = (0..to).map(|n| format!("\"s{n}\"")).collect();
        let from = from.join(", ");
        edges += &format!("[stage.s{to}]\n");
        if to > 0 {
            edges += &format!("from = [{from}]\n");
        }
    }
    assert!(wrong(&edges).contains("more than 256 edges"));
    let large = "#".repeat(MAX_TOPOLOGY_BYTES);
    assert!(wrong(&large).contains("at most 262144"));
}

fn output(port: &str, key: &str, payload: &str) -> NewTask {
    NewTask {
        port: port.into(),
        key: Bytes::copy_from_slice(key.as_bytes()),
        payload: Bytes::copy_from_slice(payload.as_bytes()),
        payload_encoding: Encoding::Json,
        ..NewTask::default()
    }
}

fn room(tasks: usize) -> FanOut {
    let bytes = usize::MAX;
    FanOut { tasks, bytes }
}

/// The queues and keys to which a report of a stage goes.
fn routed(stage: usize, mut report: Completion) -> Result<Vec<(String, String)>, String> {
    let parent = "01890a5d-ac96-774b-bcce-b302099a8057"
        .parse::<TaskId>()
        .unwrap();
    crawl().route(stage, parent, &mut report, &mut room(4))?;
    let task = |task: NewTask| {
        assert_eq!(task.port, "");
        (task.queue, String::from_utf8_lossy(&task.key).into_owned())
    };
    Ok(report.discovered.into_iter().map(task).collect())
}

#[test]
fn outputs_go_where_ports_and_conditions_say() {
    let pair = |(queue, key): (&str, &str)| (queue.to_owned(), key.to_owned());
    let of = |discovered: Vec<NewTask>| {
        let report = Completion {
            discovered,
            ..Completion::default()
        };
        routed(1, report)
    };
    let mut html = output("page", "", &json!({"lang": "de"}).to_string());
    html.headers.insert("kind".into(), "html".into());
    let derived = "01890a5d-ac96-774b-bcce-b302099a8057:1:page";
    assert_eq!(
        of(vec![output("link", "http://a/b", "{}"), html]).unwrap(),
        [
            ("crawl.fetch", "http://a/b"),
            ("crawl.index", derived),
            ("crawl.screenshot", derived),
        ]
        .map(pair)
    );
    // Without the header only one edge fits, and a task with a queue leaves the topology.
    let mut other = output("", "k", "{}");
    other.queue = "elsewhere".into();
    let page = output("page", "p", &json!({"lang": ["fr", "en"]}).to_string());
    assert_eq!(
        of(vec![other.clone(), page]).unwrap(),
        [("elsewhere", "k"), ("crawl.index", "p")].map(pair)
    );
    other.port = "page".into();
    for (discovered, said) in [
        (
            output("lnk", "", "1"),
            "discovered[0]: stage parse has no port \"lnk\"; it has page, link",
        ),
        (output("", "", "1"), "stage parse has no port \"out\""),
        (other, "discovered[0] names a queue and a port"),
    ] {
        let error = of(vec![discovered]).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    let many = vec![output("link", "", "1"); 5];
    assert!(of(many).unwrap_err().contains("more than 4 tasks"));
    // An output may have many edges.
    let large = json!({"lang": "de", "text": "x".repeat(5 << 20)}).to_string();
    let mut large = output("page", "", &large);
    large.headers.insert("kind".into(), "html".into());
    let error = of(vec![large]).unwrap_err();
    assert!(error.contains("more than 8388608 bytes"), "{error}");
    let mut report = Completion {
        discovered: vec![output("link", "", "1")],
        ..Completion::default()
    };
    let mut room = FanOut {
        tasks: 4,
        bytes: 10,
    };
    let error = crawl().route(1, TaskId::new(), &mut report, &mut room);
    assert!(error.unwrap_err().contains("report fewer tasks at once"));
}

#[test]
fn a_plain_result_is_one_output() {
    let report = |result: &'static str| Completion {
        result: result.into(),
        ..Completion::default()
    };
    let fetched = routed(0, report("body")).unwrap();
    assert_eq!(fetched[0].0, "crawl.parse");
    assert_eq!(fetched[0].1, "01890a5d-ac96-774b-bcce-b302099a8057:0:out");
    assert_eq!(routed(0, report("")).unwrap(), []);
    // Its ports have names, and a result is none of them.
    assert_eq!(routed(1, report("body")).unwrap(), []);
    assert_eq!(routed(2, report("body")).unwrap(), []);
}

#[test]
fn tasks_of_a_stage_have_its_settings() {
    let crawl = crawl();
    let mut task = NewTask {
        max_attempts: Some(9),
        ..NewTask::default()
    };
    crawl.complete_insert(0, &mut task).unwrap();
    assert_eq!(task.max_attempts, Some(9));
    assert_eq!(task.priority, Some(Priority::Low));
    assert!(task.backoff.is_some());
    let expected = NewTree {
        then: "reports".into(),
        timeout: Some(Duration::from_secs(3600)),
        on_dead: Some(TreeOnDead::Hold),
        feed: None,
    };
    assert_eq!(task.tree.as_deref(), Some(&TaskTree::Root(expected)));
    let mut task = NewTask::default();
    crawl.complete_insert(2, &mut task).unwrap();
    assert_eq!(task, NewTask::default());
    task.replicas = Some(2);
    let error = crawl.complete_insert(2, &mut task).unwrap_err();
    assert!(error.contains("is for one worker"), "{error}");
}

/// A way to a join within the ways to another.
const NESTED: &str = r#"
name = "geo"

[stage.land]
start = true

[stage.town]
from = "land"
ports = ["street", "bare", "news"]

[stage.street]
from = "town.street"

[stage.town_map]
join = "town"
from = ["street", "town.bare"]

[stage.land_map]
join = "land"
from = ["town_map"]

[stage.news]
from = ["town.news", "land_map"]
"#;

#[test]
fn stages_between_a_fork_and_its_join_are_a_level() {
    let geo = Topology::read(NESTED).unwrap();
    let ways: Vec<(&str, &str, Way)> = geo
        .stages
        .iter()
        .flat_map(|stage| {
            let edges = stage.edges.iter();
            edges.map(|edge| (&*stage.name, &*geo.stages[edge.to].name, edge.way))
        })
        .collect();
    let place = |name| u32::try_from(geo.stages.iter().position(|one| one.name == name).unwrap());
    let [land_map, town_map] = ["land_map", "town_map"].map(|name| place(name).unwrap());
    assert_eq!(
        ways,
        [
            ("land", "town", Way::Into(land_map)),
            ("town", "street", Way::Into(town_map)),
            ("town", "town_map", Way::Into(town_map)),
            ("town", "news", Way::Out(1)),
            ("street", "town_map", Way::Out(0)),
            ("town_map", "land_map", Way::Out(0)),
            ("land_map", "news", Way::Out(0)),
        ]
    );
    // A loop around the fork is outside of the level.
    let crawl = Topology::read(&format!(
        "{CRAWL}\n[stage.page]\njoin = \"parse\"\nfrom = [\"index\", \"screenshot\"]\n"
    ));
    let crawl = crawl.unwrap();
    let [_, parse, index, ..] = &crawl.stages[..] else {
        panic!();
    };
    let ways: Vec<Way> = parse.edges.iter().map(|edge| edge.way).collect();
    assert_eq!(ways, [Way::Out(0), Way::Into(4), Way::Into(4)]);
    assert_eq!(index.edges[0].way, Way::Out(0));
}

#[test]
fn outputs_into_a_join_are_parts() {
    let geo = Topology::read(NESTED).unwrap();
    let mut report = Completion {
        discovered: vec![
            output("street", "", "1"),
            output("bare", "k", "2"),
            output("news", "", "3"),
            NewTask {
                queue: "elsewhere".into(),
                ..output("", "e", "4")
            },
        ],
        ..Completion::default()
    };
    let parent = TaskId::new();
    geo.route(1, parent, &mut report, &mut room(10)).unwrap();
    let queues: Vec<&str> = report.discovered.iter().map(|task| &*task.queue).collect();
    assert_eq!(queues, ["geo.street", "geo.news", "elsewhere"]);
    let joining = report.joining.unwrap();
    assert_eq!(joining.ways, [Way::Into(0), Way::Out(1), Way::TOP]);
    let [join] = &joining.joins[..] else {
        panic!("{joining:?}");
    };
    assert_eq!(join.task.queue, "geo.town_map");
    assert_eq!(join.from, ["town", "street"]);
    let [part] = &joining.parts[..] else {
        panic!("{joining:?}");
    };
    assert_eq!((&*part.stage, &*part.port, part.index), ("town", "bare", 1));
    assert_eq!((part.way, &part.key[..]), (Way::Into(0), &b"k"[..]));
    // Where nothing leaves its level, there is nothing to say.
    let mut report = Completion {
        result: "5".into(),
        ..Completion::default()
    };
    geo.route(4, parent, &mut report, &mut room(10)).unwrap();
    assert_eq!((report.discovered.len(), report.joining), (1, None));
}

#[test]
fn wrong_joins_are_named() {
    let stages = |lines: &str| {
        let mut text = String::new();
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (name, rest) = line.split_once(' ').unwrap();
            text.push_str(&format!("[stage.{name}]\n{}\n", rest.replace("; ", "\n")));
        }
        wrong(&text)
    };
    for (lines, says) in [
        (
            "a start = true\nj from = \"a\"; join = \"b\"",
            "6:8: there is no stage \"b\" to join",
        ),
        (
            "a start = true\nb from = \"a\"\nj from = \"a\"; join = \"b\"",
            "no way leads from stage b to stage j",
        ),
        (
            "a start = true\nj from = \"a\"; join = \"j\"",
            "stage j cannot join itself",
        ),
        (
            "a start = true\nb from = \"a\"; start = true\nj from = \"b\"; join = \"a\"",
            "stage b lies between a and j, which joins what comes from one task of a, so nothing begins there",
        ),
        (
            "a start = true\nj join = \"a\"",
            "stage j is a join, and nothing goes into it: from is missing",
        ),
        (
            "a start = true\nj from = \"a\"; join = \"a\"; start = true",
            "stage j is a join, so nothing begins there: leave out start",
        ),
        (
            "a start = true\nx start = true\nb from = [\"a\", \"x\"]\nj from = \"b\"; join = \"a\"",
            "x is not between them, so b cannot take from it",
        ),
        (
            "a start = true\nx start = true\nb from = \"a\"\nj from = [\"b\", \"x\"]; join = \"a\"",
            "x is not between them, so j cannot take from it",
        ),
        (
            "a start = true\nb from = \"a\"\nc from = \"b\"\nd from = \"c\"\nj from = \"c\"; join = \"a\"\nk from = \"d\"; join = \"b\"",
            "the ways from a to j and from b to k cross",
        ),
    ] {
        let said = stages(lines);
        assert!(said.contains(says), "{said}");
    }
}

#[test]
fn feeds_are_read() {
    let topology = Topology::read(
        r#"
name = "t"
[feed.urls]
type = "topic"
topic = "urls"
into = "a"
[feed.stream]
type = "redis_stream"
url = "redis://h:1"
key = "k"
into = "a"
start = "2026-01-31T12:00:00Z"
ack = "done"
ack_batch = 1
delete = true
pending = [{ idle = "1m", deliveries = 3, do = "move", to = "list:dead" }, { idle = "1h", do = "claim" }]
[feed.list]
type = "redis_list"
url = "rediss://h"
key = "l"
pop = "right"
into = "a"
[stage.a]
"#,
    )
    .unwrap();
    let [urls, stream, list] = &topology.feeds[..] else {
        panic!("{topology:?}");
    };
    assert_eq!(urls.name.as_str(), "t.urls");
    assert_eq!((urls.source.kind(), urls.source.reads()), ("topic", "urls"));
    assert_eq!(stream.ack, FeedAck::Done);
    assert_eq!((stream.ack_batch, list.ack_batch), (1, 100));
    let expected = RedisStream {
        url: "redis://h:1".into(),
        key: "k".into(),
        group: "taskd".into(),
        start: "1769860800000".into(),
        count: 100,
        block: Duration::from_secs(1),
        delete: true,
        payload: String::new(),
        pending: vec![
            PendingRule {
                idle: Duration::from_secs(60),
                deliveries: 3,
                act: PendingAct::Move(MoveTo::List("dead".into())),
            },
            PendingRule {
                idle: Duration::from_secs(3600),
                deliveries: 1,
                act: PendingAct::Claim,
            },
        ],
    };
    assert_eq!(stream.source, FeedSource::RedisStream(expected));
    let expected = RedisList {
        url: "rediss://h".into(),
        key: "l".into(),
        from_right: true,
        count: 100,
    };
    assert_eq!(list.source, FeedSource::RedisList(expected));
}

#[test]
fn every_mistake_of_a_feed_is_named_with_its_place() {
    const STREAM: &str =
        "type = \"redis_stream\"\nurl = \"redis://h\"\nkey = \"k\"\ninto = \"a\"\n";
    for (lines, said) in [
        ("into = \"a\"", "4:7: type is missing; expected topic,"),
        (
            "type = \"amqp\"\ninto = \"a\"",
            "5:8: type is \"amqp\"; expected topic,",
        ),
        (
            "type = \"redis_list\"\nkey = \"k\"\ninto = \"a\"",
            "4:7: url is missing",
        ),
        (
            "type = \"redis_list\"\nkey = \"k\"\nurl = \"http://h\"\ninto = \"a\"",
            "7:7: url must name one Redis",
        ),
        (
            "type = \"redis_list\"\nurl = \"redis://h\"\ninto = \"a\"",
            "4:7: key is missing",
        ),
        ("type = \"topic\"\ninto = \"a\"", "4:7: topic is missing"),
        ("type = \"topic\"\ntopic = \"t\"", "4:7: into is missing"),
        (
            "type = \"topic\"\ntopic = \"t\"\ninto = \"x\"",
            "7:8: there is no stage \"x\"",
        ),
        (
            "type = \"topic\"\ntopic = \"t\"\ninto = \"b\"",
            "7:8: no tree begins in stage b: say start = true there",
        ),
        (
            "type = \"topic\"\ntopic = \"t\"\ninto = \"a\"\nack = \"done\"",
            "8:1: unknown key \"ack\"; expected type, into, topic,",
        ),
    ] {
        let found = wrong(&format!(
            "[stage.a]\n[stage.b]\nfrom = \"a\"\n[feed.f]\n{lines}"
        ));
        let said = said.split_once(':').map(|(line, rest)| {
            let line: usize = line.parse().unwrap();
            format!("{}:{rest}", line + 1)
        });
        let said = said.unwrap();
        assert!(found.contains(&said), "{lines}: {said}: {found}");
    }
    for (line, said) in [
        (
            "ack = \"later\"",
            "ack is \"later\"; expected stored, done or none",
        ),
        ("ack_batch = 0", "ack_batch must be a number from 1 to 1000"),
        ("ack_interval = \"2h\"", "ack_interval must be 1ms to 1h"),
        ("block = \"1m\"", "block must be 1ms to 5s"),
        ("count = 5000", "count must be a number from 1 to 1000"),
        ("start = \"yesterday\"", "start must be \"0\", \"$\""),
        ("group = \"\"", "group must have 1 to 512 bytes"),
        ("pop = \"left\"", "unknown key \"pop\""),
        ("pending = 5", "8:11: pending must be a list of tables"),
        ("pending = [{ do = \"ack\" }]", "8:12: idle is missing"),
        (
            "pending = [{ idle = \"1m\", do = \"drop\" }]",
            "8:32: do is \"drop\"; expected claim, ack, delete or move",
        ),
        (
            "ack = \"none\"\npending = [{ idle = \"1m\", do = \"claim\" }]",
            "9:11: pending needs an ack other than none",
        ),
        (
            "pending = [{ idle = \"1m\", do = \"move\" }]",
            "do is move; say where",
        ),
        (
            "pending = [{ idle = \"1m\", do = \"move\", to = \"bag:x\" }]",
            "to is \"bag:x\"; expected stream:KEY,",
        ),
        (
            "pending = [{ idle = \"1m\", do = \"ack\", to = \"list:x\" }]",
            "to is for do = \"move\", and not for ack",
        ),
        (
            "pending = [{ idle = \"1m\", do = \"ack\", deliverys = 3 }]",
            "unknown key \"deliverys\"; expected idle, deliveries, do, to",
        ),
    ] {
        let found = wrong(&format!("[stage.a]\n[feed.f]\n{STREAM}{line}"));
        assert!(found.contains(said), "{line}: {found}");
    }
}

#[test]
fn a_topology_is_drawn() {
    let dot = crawl().to_dot();
    assert!(dot.contains("\"fetch\" [shape = doubleoctagon];"), "{dot}");
    assert!(
        dot.contains("\"parse\" -> \"fetch\" [label = \"link\", style = dashed];"),
        "{dot}"
    );
    let mermaid = crawl().to_mermaid();
    assert!(mermaid.contains("s0 --> s1\n"), "{mermaid}");
    assert!(mermaid.contains("s1 -.->|\"link\"| s0\n"), "{mermaid}");
}
