//! Counts the parts of an encoded protobuf message.

use std::{collections::HashMap, sync::Arc};

use prost::Message as _;
use prost_types::{DescriptorProto, FileDescriptorSet, field_descriptor_proto::Label};

use crate::ingress::tally::{Excess, Tally};

/// Why a message is not decoded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum Refused {
    #[error(transparent)]
    Excess(#[from] Excess),
    #[error("the message cannot be read: {0}")]
    Malformed(&'static str),
}

/// Counts a field of this many bytes.
type Count = fn(&mut Tally<'_>, usize) -> Result<(), Excess>;

/// The fields of a message that are counted: number, count, and the shape of its own fields.
pub(super) struct Shape(Vec<(u64, Count, Option<Arc<Shape>>)>);

/// The shapes of the messages in these descriptors.
pub(super) struct Shapes {
    messages: HashMap<String, DescriptorProto>,
    /// The type of each method's request.
    requests: HashMap<String, String>,
}

impl Shapes {
    pub(super) fn new() -> Self {
        let files = FileDescriptorSet::decode(taskd_proto::DESCRIPTORS)
            .expect("the descriptors of this build are protobuf")
            .file;
        let mut messages = HashMap::new();
        let mut requests = HashMap::new();
        for file in files {
            let package = file.package().to_owned();
            for message in file.message_type {
                messages.insert(format!(".{package}.{}", message.name()), message);
            }
            for service in &file.service {
                for method in &service.method {
                    let name = format!("{package}.{}/{}", service.name(), method.name());
                    requests.insert(name, method.input_type().to_owned());
                }
            }
        }
        Self { messages, requests }
    }

    /// Returns the shape of a method's request.
    pub(super) fn of(&self, method: &str) -> Arc<Shape> {
        let request = self
            .requests
            .get(method)
            .unwrap_or_else(|| panic!("the protos have no method {method}"));
        Arc::new(self.of_message(request))
    }

    /// Finds the repeated fields of a message, and the fields that contain some. No message
    /// contains itself.
    fn of_message(&self, name: &str) -> Shape {
        let mut fields = Vec::new();
        // The entry of a map is not in the list of messages.
        let Some(message) = self.messages.get(name) else {
            return Shape(fields);
        };
        for field in &message.field {
            let inner = self.of_message(field.type_name());
            let inner = (!inner.0.is_empty()).then(|| Arc::new(inner));
            let is_repeated = field.label() == Label::Repeated;
            if !is_repeated && inner.is_none() {
                continue;
            }
            let count: Count = if is_repeated {
                count_of(message.name(), field.name())
            } else {
                |_, _| Ok(())
            };
            let number = u64::try_from(field.number()).expect("fields have positive numbers");
            fields.push((number, count, inner));
        }
        Shape(fields)
    }
}

/// How a repeated field is counted: as an item, which `max_items` limits, unless it is listed here.
fn count_of(message: &str, field: &str) -> Count {
    match (message, field) {
        (_, "tasks") => |tally, _| tally.task(),
        (_, "discovered") => |tally, _| tally.discovered(),
        (_, "queues") => |tally, _| tally.queue(),
        // Packed or not, a status takes at least one byte.
        ("TaskFilter", "statuses") => |tally, bytes| tally.filter_statuses(bytes),
        ("TaskFilter", "headers") => |tally, _| tally.filter_header(),
        // `holding` and `started` are ids of tasks in hand, of which a session may have many more
        // than `max_items`. `weights` come with the items of a report, and the check of the request
        // bounds them by its queues.
        (_, "headers" | "attributes" | "holding" | "started" | "weights") => {
            |tally, _| tally.header()
        }
        _ => |tally, _| tally.item(),
    }
}

/// Counts the parts of `message`.
pub(super) fn count(
    mut message: &[u8],
    shape: &Shape,
    tally: &mut Tally<'_>,
) -> Result<(), Refused> {
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let field = match key & 7 {
            0 => {
                let before = message;
                varint(&mut message)?;
                &before[..before.len() - message.len()]
            }
            1 => bytes(&mut message, 8)?,
            2 => {
                let length = usize::try_from(varint(&mut message)?).map_err(|_| TOO_SHORT)?;
                bytes(&mut message, length)?
            }
            5 => bytes(&mut message, 4)?,
            // The decoder would skip a group and continue after it.
            _ => {
                return Err(Refused::Malformed(
                    "it has a group or an unknown type of field",
                ));
            }
        };
        if let Some((_, one, inner)) = shape.0.iter().find(|(number, ..)| *number == key >> 3) {
            one(tally, field.len())?;
            if let Some(inner) = inner {
                count(field, inner, tally)?;
            }
        }
    }
    Ok(())
}

const TOO_SHORT: Refused = Refused::Malformed("it ends in the middle of a field");

fn bytes<'a>(message: &mut &'a [u8], length: usize) -> Result<&'a [u8], Refused> {
    let (field, rest) = message.split_at_checked(length).ok_or(TOO_SHORT)?;
    *message = rest;
    Ok(field)
}

fn varint(message: &mut &[u8]) -> Result<u64, Refused> {
    let mut value = 0;
    for shift in (0..70).step_by(7) {
        let (byte, rest) = message.split_first().ok_or(TOO_SHORT)?;
        *message = rest;
        value |= u64::from(byte & 0x7f).wrapping_shl(shift);
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Refused::Malformed("a number has more than ten bytes"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::wire::pb;
    use crate::{
        config::Settings,
        ingress::{
            fuzz::{hostile, within},
            net::budget::Budget,
            operations,
        },
    };

    fn counted(path: &str, message: &[u8]) -> Result<(), String> {
        let (settings, share) = (Settings::default(), Budget::new(256 << 20).share());
        let mut tally = Tally::new(&settings, &share, message.len());
        count(message, &Shapes::new().of(path), &mut tally).map_err(|refused| refused.to_string())
    }

    fn refused(path: &str, message: &[u8]) -> String {
        counted(path, message).unwrap_err()
    }

    #[test]
    fn real_messages_pass() {
        let task = pb::NewTask {
            queue: "q".into(),
            key: "k".into(),
            headers: [("a".into(), "b".into())].into(),
            max_attempts: Some(3),
            ..Default::default()
        };
        let insert = pb::InsertTasksRequest {
            tasks: vec![task.clone(); 20_000],
            ..Default::default()
        };
        counted("taskd.v1.Discovery/InsertTasks", &insert.encode_to_vec()).unwrap();
        let completion = pb::Completion {
            id: "i".into(),
            discovered: vec![task; 50],
            ..Default::default()
        };
        let next = pb::GetTasksRequest {
            worker: "w".into(),
            queues: vec!["a".into(), "b".into()],
            weights: [("a".into(), 3), ("b".into(), 1)].into(),
            ..Default::default()
        };
        let complete = pb::CompleteTasksRequest {
            worker: "w".into(),
            completions: vec![completion; 1000],
            next: Some(next),
        };
        counted("taskd.v1.Tasks/CompleteTasks", &complete.encode_to_vec()).unwrap();
        let filter = pb::TaskFilter {
            statuses: (1..=7).collect(),
            headers: [("a".into(), "b".into())].into(),
            ..Default::default()
        };
        let change = pb::ChangeTasksRequest {
            filter: Some(filter),
            ..Default::default()
        };
        counted("taskd.v1.Operator/ChangeTasks", &change.encode_to_vec()).unwrap();
        let queues = vec!["q".into(); 100];
        let get = pb::GetTasksRequest {
            worker: "w".into(),
            queues,
            ..Default::default()
        };
        counted("taskd.v1.Tasks/GetTasks", &get.encode_to_vec()).unwrap();
    }

    #[test]
    fn too_many_parts_are_refused_wherever_they_stand() {
        let insert = "taskd.v1.Discovery/InsertTasks";
        assert!(
            refused(insert, &[0x0a, 0].repeat(20_001))
                .starts_with("more than 20000 tasks in one request")
        );
        for method in ["CompleteTasks", "RejectTasks", "ExtendTasks"] {
            let said = refused(&format!("taskd.v1.Tasks/{method}"), &[0x12, 0].repeat(1001));
            assert_eq!(said, "more than 1000 items in one call (max_items)");
        }
        assert_eq!(
            refused("taskd.v1.Tasks/GetTasks", &[0x12, 0].repeat(101)),
            "more than 100 queues"
        );
        let completion = pb::Completion {
            discovered: vec![pb::NewTask::default(); 50_001],
            ..Default::default()
        };
        let complete = pb::CompleteTasksRequest {
            worker: "w".into(),
            completions: vec![completion],
            next: None,
        };
        let said = refused("taskd.v1.Tasks/CompleteTasks", &complete.encode_to_vec());
        assert!(
            said.starts_with("more than 50000 discovered tasks"),
            "{said}"
        );
        // 4 MiB of headers of one task.
        let headers = (0..500_000_u32)
            .map(|n| (format!("{n:06x}"), String::new()))
            .collect();
        let task = pb::NewTask {
            headers,
            ..Default::default()
        };
        let said = refused(
            insert,
            &pb::InsertTasksRequest {
                tasks: vec![task],
                ..Default::default()
            }
            .encode_to_vec(),
        );
        assert!(
            said.contains("bytes of memory; send fewer at once"),
            "{said}"
        );
    }

    #[test]
    fn the_parts_of_a_filter_are_bounded_packed_or_not() {
        let filter = |method: &str, number: u32, filter: &[u8]| {
            let mut message = Vec::new();
            prost::encoding::bytes::encode(number, &filter.to_vec(), &mut message);
            refused(&format!("taskd.v1.{method}"), &message)
        };
        let mut packed = Vec::new();
        prost::encoding::bytes::encode(2, &vec![1; 101], &mut packed);
        let headers = [0x2a, 0].repeat(17);
        for (method, number) in [
            ("Discovery/ListTasks", 1),
            ("Discovery/CancelTasks", 2),
            ("Operator/RetryTasks", 2),
            ("Operator/ChangeTasks", 4),
            ("Operator/RequeueTasks", 5),
        ] {
            for statuses in [&packed, &[0x10, 1].repeat(101)] {
                assert_eq!(
                    filter(method, number, statuses),
                    "more than 100 statuses in a filter",
                    "{method}"
                );
            }
            assert_eq!(
                filter(method, number, &headers),
                "more than 16 headers in a filter",
                "{method}"
            );
        }
    }

    #[test]
    fn every_repeated_field_of_a_request_has_a_count() {
        let shapes = Shapes::new();
        let methods: BTreeSet<&str> = operations::all()
            .iter()
            .filter_map(|one| one.grpc)
            .collect();
        let described: BTreeSet<&str> = shapes.requests.keys().map(String::as_str).collect();
        assert_eq!(methods, described);
        let mut counted = Vec::new();
        let mut left: Vec<String> = shapes.requests.values().cloned().collect();
        while let Some(name) = left.pop() {
            let Some(message) = shapes.messages.get(&name) else {
                continue;
            };
            let shape = shapes.of_message(&name);
            for field in &message.field {
                let number = u64::try_from(field.number()).unwrap();
                let found = shape.0.iter().any(|(of, ..)| *of == number);
                if field.label() == Label::Repeated {
                    assert!(found, "{name}, {}", field.name());
                    counted.push(format!("{}.{}", message.name(), field.name()));
                }
                left.push(field.type_name().to_owned());
            }
        }
        counted.sort_unstable();
        counted.dedup();
        assert!(counted.len() > 10, "{counted:?}");
    }

    #[test]
    fn what_is_no_protobuf_is_malformed() {
        for message in [
            &[0x0a, 5, 1][..],
            &[0x0a],
            &[0xff; 11],
            &[0x09, 1],
            &[0x0d],
            &[0xfb, 1, 0xfc, 1],
        ] {
            assert!(
                refused("taskd.v1.Discovery/InsertTasks", message)
                    .starts_with("the message cannot be read")
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn messages_of_any_kind_are_counted_before_they_are_decoded(message in hostile(messages())) {
            let shapes = Shapes::new();
            for method in [
                "taskd.v1.Discovery/InsertTasks",
                "taskd.v1.Tasks/GetTasks",
                "taskd.v1.Tasks/CompleteTasks",
                "taskd.v1.Tasks/StreamTasks",
                "taskd.v1.Operator/ChangeTasks",
            ] {
                let counted = within(message.len(), |tally| count(&message, &shapes.of(method), tally));
                // A message that is decoded without having been counted could be of any size.
                let is_read = match method {
                    "taskd.v1.Discovery/InsertTasks" => same::<pb::InsertTasksRequest>(&message),
                    "taskd.v1.Tasks/GetTasks" => same::<pb::GetTasksRequest>(&message),
                    "taskd.v1.Tasks/CompleteTasks" => same::<pb::CompleteTasksRequest>(&message),
                    _ => continue,
                };
                let is_group = counted.as_ref().is_err_and(|error| error.to_string().contains("group"));
                let is_passed = matches!(counted, Ok(()) | Err(Refused::Excess(_)));
                prop_assert!(is_passed || !is_read || is_group, "{method} {message:?}: {counted:?}");
            }
        }
    }

    /// True if the bytes are a message. Asserts that it is the same after encoding and decoding it.
    fn same<T: prost::Message + Default + PartialEq + std::fmt::Debug>(bytes: &Bytes) -> bool {
        T::decode(bytes.clone()).is_ok_and(|message| {
            assert_eq!(T::decode(&message.encode_to_vec()[..]), Ok(message));
            true
        })
    }

    fn messages() -> Vec<Vec<u8>> {
        let task = pb::NewTask {
            queue: "q".into(),
            key: "k".into(),
            payload: "p".into(),
            headers: [("a".into(), "b".into())].into(),
            max_attempts: Some(3),
            ..Default::default()
        };
        let completion = pb::Completion {
            id: "i".into(),
            discovered: vec![task.clone(); 2],
            ..Default::default()
        };
        vec![
            pb::InsertTasksRequest {
                tasks: vec![task; 2],
                ..Default::default()
            }
            .encode_to_vec(),
            pb::CompleteTasksRequest {
                worker: "w".into(),
                completions: vec![completion],
                next: None,
            }
            .encode_to_vec(),
            pb::GetTasksRequest {
                worker: "w".into(),
                queues: vec!["q".into(); 2],
                ..Default::default()
            }
            .encode_to_vec(),
        ]
    }
}
