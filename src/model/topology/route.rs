//! Turns the outputs of a report into discovered tasks.

use serde_json::Value;

use super::{OUT, Stage, Topology};
use crate::model::{
    Completion, ECHO, Encoding, Joining, MAX_RECORD_BYTES, NewJoin, NewTask, Part, TaskId, Way,
    shorten, validate,
};

/// How much the outputs of reports may become.
#[derive(Clone, Copy, Debug)]
pub struct FanOut {
    /// The most tasks and parts of a report.
    pub tasks: usize,
    /// The bytes that are left for this report and the others of the call.
    pub bytes: usize,
}

/// What an output has that edges can ask for.
struct Facts {
    /// The headers, and the values of the JSON pointers that edges name.
    attributes: Vec<(String, String)>,
}

impl Topology {
    /// Replaces the outputs of a report about a task of this stage by tasks of the next stages. Fails
    /// if an output cannot go anywhere, or if there is no room for what they become.
    ///
    /// A result without discovered tasks is one output.
    pub fn route(
        &self,
        stage: usize,
        parent: TaskId,
        report: &mut Completion,
        room: &mut FanOut,
    ) -> Result<(), String> {
        let stage = &self.stages[stage];
        for unreadable in &report.unreadable {
            if unreadable.task.queue.is_empty() {
                return Err(format!("an output cannot be read: {}", unreadable.reason));
            }
        }
        let is_plain = report.discovered.is_empty()
            && report.unreadable.is_empty()
            && report.not_stored.is_empty();
        let mut sent = Sent {
            parent,
            room: *room,
            bytes: 0,
            tasks: Vec::new(),
            joining: Joining::default(),
            joins: Vec::new(),
        };
        if is_plain && !report.result.is_empty() && stage.has_port(OUT) {
            let output = NewTask {
                payload: report.result.clone(),
                payload_encoding: report.result_encoding,
                ..NewTask::default()
            };
            self.send(stage, 0, output, &mut sent)?;
        } else {
            let outputs = std::mem::take(&mut report.discovered);
            for (index, mut output) in outputs.into_iter().enumerate() {
                if !output.queue.is_empty() {
                    if !output.port.is_empty() {
                        return Err(format!(
                            "discovered[{index}] names a queue and a port; name one of them"
                        ));
                    }
                    sent.task(output, Way::TOP)?;
                    continue;
                }
                if output.port.is_empty() {
                    OUT.clone_into(&mut output.port);
                }
                if !stage.has_port(&output.port) {
                    return Err(format!(
                        "discovered[{index}]: {}",
                        stage.no_port(&output.port)
                    ));
                }
                self.send(stage, index, output, &mut sent)?;
            }
        }
        room.bytes = room.bytes.saturating_sub(sent.bytes);
        report.discovered = sent.tasks;
        // Only topologies with joins have levels.
        let has_joins = self.stages.iter().any(|stage| stage.join.is_some());
        if has_joins && !sent.joining.is_plain() {
            report.joining = Some(Box::new(sent.joining));
        }
        Ok(())
    }

    /// Sends an output over each edge of its port whose condition it fulfils.
    fn send(
        &self,
        from: &Stage,
        index: usize,
        output: NewTask,
        sent: &mut Sent,
    ) -> Result<(), String> {
        let port = match output.port.as_str() {
            "" => OUT,
            port => port,
        };
        let edges = || from.edges.iter().filter(|edge| edge.port == port);
        let facts = Facts::of(&output, edges().flat_map(|edge| edge.matching.names()));
        for edge in edges() {
            if !edge.matching.matches(&output.key, &facts.attributes) {
                continue;
            }
            let to = &self.stages[edge.to];
            let way = match edge.way {
                Way::Into(join) => sent.begin(self, place(join))?,
                out => out,
            };
            if to.join.is_some() {
                sent.part(Part {
                    way,
                    join: to.queue.as_str().to_owned(),
                    index: u32::try_from(index).unwrap_or(u32::MAX),
                    stage: from.name.clone(),
                    port: port.to_owned(),
                    key: output.key.clone(),
                    payload: output.payload.clone(),
                    encoding: output.payload_encoding,
                })?;
                continue;
            }
            let mut task = output.clone();
            task.queue = to.queue.as_str().to_owned();
            if task.key.is_empty() {
                // The hash of the payload would drop equal outputs.
                task.key = format!("{}:{index}:{port}", sent.parent).into();
            }
            task.port = String::new();
            to.apply_to(&mut task)
                .map_err(|why| format!("discovered[{index}]: {why}"))?;
            sent.task(task, way)?;
        }
        Ok(())
    }
}

/// What the outputs of a report became.
struct Sent {
    parent: TaskId,
    room: FanOut,
    /// Of the tasks and parts so far.
    bytes: usize,
    tasks: Vec<NewTask>,
    joining: Joining<NewJoin>,
    /// The place in [`Topology::stages`] of each join that begins.
    joins: Vec<usize>,
}

impl Sent {
    fn task(&mut self, task: NewTask, way: Way) -> Result<(), String> {
        self.bytes += validate::weight(&task);
        self.tasks.push(task);
        self.joining.ways.push(way);
        self.has_room()
    }

    fn part(&mut self, part: Part) -> Result<(), String> {
        self.bytes += part.weight();
        self.joining.parts.push(part);
        self.has_room()
    }

    fn has_room(&self) -> Result<(), String> {
        let FanOut { tasks: most, bytes } = self.room;
        if self.bytes > MAX_RECORD_BYTES {
            return Err(format!(
                "the outputs become more than {MAX_RECORD_BYTES} bytes; send fewer, or in several stages"
            ));
        }
        if self.bytes > bytes {
            return Err(
                "the outputs of this call become too many bytes; report fewer tasks at once"
                    .to_owned(),
            );
        }
        if self.tasks.len() + self.joining.parts.len() > most {
            return Err(format!(
                "the outputs become more than {most} tasks; send fewer, or in several stages"
            ));
        }
        Ok(())
    }

    /// Begins the subtree of a join, unless the report has done so before.
    fn begin(&mut self, topology: &Topology, join: usize) -> Result<Way, String> {
        let known = self.joins.iter().position(|known| *known == join);
        let place = match known {
            Some(place) => place,
            None => {
                let stage = &topology.stages[join];
                let mut task = NewTask {
                    queue: stage.queue.as_str().to_owned(),
                    ..NewTask::default()
                };
                stage.apply_to(&mut task)?;
                let leads = |from: &&Stage| from.edges.iter().any(|edge| edge.to == join);
                let from = topology.stages.iter().filter(leads);
                self.joining.joins.push(NewJoin {
                    task,
                    from: from.map(|stage| stage.name.clone()).collect(),
                });
                self.joins.push(join);
                self.joins.len() - 1
            }
        };
        Ok(Way::Into(u32::try_from(place).unwrap_or(u32::MAX)))
    }
}

fn place(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Stage {
    pub(super) fn has_port(&self, port: &str) -> bool {
        self.ports.iter().any(|known| known == port)
    }

    pub(super) fn no_port(&self, port: &str) -> String {
        if let Some(topic) = &self.topic {
            let name = &self.name;
            return format!(
                "stage {name} publishes into topic {topic} and has no outputs; take from where it takes"
            );
        }
        let port = shorten(port, ECHO);
        let ports = self.ports.join(", ");
        format!("stage {} has no port {port:?}; it has {ports}", self.name)
    }
}

impl Facts {
    /// The facts of an output that conditions with these names need.
    fn of<'n>(output: &NewTask, names: impl Iterator<Item = &'n str>) -> Self {
        let mut attributes = Vec::new();
        let mut payload = None;
        for name in names {
            if attributes.iter().any(|(known, _)| known == name) {
                continue;
            }
            if name.starts_with('/') {
                let payload = payload.get_or_insert_with(|| json_of(output));
                if let Some(value) = payload.pointer(name) {
                    add_texts(name, value, &mut attributes);
                }
            } else if let Some(value) = output.headers.get(name) {
                attributes.push((name.to_owned(), value.clone()));
            }
        }
        Self { attributes }
    }
}

/// The payload as JSON; null if it is none.
fn json_of(output: &NewTask) -> Value {
    if output.payload_encoding == Encoding::Text {
        return Value::Null;
    }
    serde_json::from_slice(&output.payload).unwrap_or_default()
}

/// Adds a value of a payload as texts: each element of a list, and null as nothing.
fn add_texts(name: &str, value: &Value, attributes: &mut Vec<(String, String)>) {
    match value {
        Value::Null => {}
        Value::String(text) => attributes.push((name.to_owned(), text.clone())),
        Value::Array(values) => {
            for value in values {
                if !value.is_array() {
                    add_texts(name, value, attributes);
                }
            }
        }
        other => attributes.push((name.to_owned(), other.to_string())),
    }
}
