//! Topics and their records over HTTP.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    http::{StatusCode, header},
    response::IntoResponse,
};
use bytes::{Buf as _, Bytes};
use futures::{StreamExt as _, stream};
use tokio_util::sync::CancellationToken;

use super::{
    super::{json, net::budget::Share},
    answer::{Answer, list, list_within, within},
    call::Call,
    events::{event_stream, last_event},
    problem::Problem,
    request::{self, Id},
};
use crate::{
    api::{self, Api, Reading},
    model::{
        Caller, MOST_PUBLISHED, Offset, PublishStatus, Published, ReadFrom, ReadTopic, TopicPage,
    },
    wire::topics::read_from,
};

/// How often a follower that gets no record gets its place, so that both sides notice a broken
/// connection.
const BEAT: Duration = Duration::from_secs(15);
/// How long the lines of a request may take to arrive, as long as any other body.
const LINES_WITHIN: Duration = Duration::from_secs(120);

pub(in crate::ingress) async fn list_topics(call: Call) -> Answer {
    let topics = call.state.api.topics(&call.caller).await?;
    list_within(&call, "topics", topics)
}

pub(in crate::ingress) async fn get_topic(Id(name): Id, call: Call) -> Answer {
    let topic = call.state.api.topic(&call.caller, &name).await?;
    within(&call, &topic)
}

pub(in crate::ingress) async fn put_topic(Id(name): Id, mut call: Call) -> Answer {
    let request = call.json(json::topics::settings).await?;
    let topic = call
        .state
        .api
        .put_topic(&call.caller, &name, &request)
        .await?;
    Ok(Json(topic).into_response())
}

pub(in crate::ingress) async fn delete_topic(Id(name): Id, call: Call) -> Answer {
    call.state.api.delete_topic(&call.caller, &name).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

pub(in crate::ingress) async fn publish(Id(name): Id, mut call: Call) -> Answer {
    if request::is_ndjson(&call.headers)? {
        return publish_lines(&name, call).await;
    }
    let expected = "application/json (a record or an array of them) or application/x-ndjson";
    let (records, is_single) = call.json_or(expected, json::topics::records).await?;
    let api = &call.state.api;
    let answers = api
        .publish(&call.caller, &name, records, api.turn())
        .await?;
    let is_rejected = is_single
        && answers
            .iter()
            .all(|answer| answer.status == PublishStatus::Rejected);
    let answer = list("results", answers)?;
    Ok(if is_rejected {
        (StatusCode::UNPROCESSABLE_ENTITY, answer).into_response()
    } else {
        answer
    })
}

/// Publishes lines in order, and answers each with a line while the client reads. A line that is no
/// record is REJECTED with its number. After a line that was not stored now, no other one is, so that
/// records of a key keep their order if the client sends these lines again.
async fn publish_lines(name: &str, mut call: Call) -> Answer {
    let late = |_| {
        let why = format!("the body took more than {} s", LINES_WITHIN.as_secs());
        Problem::new(StatusCode::REQUEST_TIMEOUT, why)
    };
    let body = tokio::time::timeout(LINES_WITHIN, call.whole())
        .await
        .map_err(late)??;
    let mut publisher = Publisher {
        turn: call.state.api.turn(),
        api: call.state.api,
        caller: call.caller,
        name: name.to_owned(),
        rest: body,
        line: 0,
        failed: None,
        _share: call.share,
    };
    // A mistake in the request as a whole, like a topic that does not exist, has a status.
    let first = match publisher.next_lines() {
        Some(lines) => publisher.publish(lines).await?,
        None => Bytes::new(),
    };
    let others = stream::unfold(publisher, async |mut publisher| {
        let lines = publisher.next_lines()?;
        let answers = publisher.publish_or_refuse(lines).await;
        Some((answers, publisher))
    });
    let answers = stream::once(std::future::ready(first)).chain(others);
    let body = Body::from_stream(answers.map(Ok::<_, std::convert::Infallible>));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// Publishes the lines of a request, some at a time.
struct Publisher {
    api: Arc<Api>,
    caller: Caller,
    name: String,
    /// The turn of all records without a key, which stay together.
    turn: u32,
    /// What follows the last line that was read.
    rest: Bytes,
    /// The number of that line.
    line: u64,
    /// Why no other line is published.
    failed: Option<String>,
    /// The body counts against the budget of all requests until the last answer is sent.
    _share: Share,
}

impl Publisher {
    /// The next lines with their numbers; `None`: there are no more.
    fn next_lines(&mut self) -> Option<Vec<(u64, Bytes)>> {
        let mut lines = Vec::new();
        while lines.len() < MOST_PUBLISHED && !self.rest.is_empty() {
            let end = self.rest.iter().position(|byte| *byte == b'\n');
            let line = self.rest.split_to(end.unwrap_or(self.rest.len()));
            self.rest.advance(usize::from(end.is_some()));
            self.line += 1;
            if !line.iter().all(u8::is_ascii_whitespace) {
                lines.push((self.line, line));
            }
        }
        (!lines.is_empty()).then_some(lines)
    }

    /// Publishes lines and returns their answers, a line each.
    async fn publish(&mut self, lines: Vec<(u64, Bytes)>) -> Result<Bytes, api::Error> {
        let records = lines.iter().map(|(_, line)| json::topics::record(line));
        let records = records.collect();
        let publishing = self
            .api
            .publish(&self.caller, &self.name, records, self.turn);
        let mut written = Vec::new();
        for ((number, _), mut answer) in lines.iter().zip(publishing.await?) {
            if answer.status == PublishStatus::TryLater {
                self.failed.get_or_insert_with(|| answer.error.clone());
            }
            write(&mut written, *number, &mut answer);
        }
        Ok(written.into())
    }

    /// Like [`Self::publish`]; if it fails, the lines are not stored, nor are those after them.
    async fn publish_or_refuse(&mut self, lines: Vec<(u64, Bytes)>) -> Bytes {
        let numbers: Vec<u64> = lines.iter().map(|(number, _)| *number).collect();
        if self.failed.is_none() {
            match self.publish(lines).await {
                Ok(answers) => return answers,
                Err(error) => self.failed = Some(error.to_string()),
            }
        }
        let why = self.failed.clone().unwrap_or_default();
        let mut written = Vec::new();
        for number in numbers {
            let mut answer = Published::failed(PublishStatus::TryLater, why.clone());
            write(&mut written, number, &mut answer);
        }
        written.into()
    }
}

/// Writes the answer to a line; its error names the line.
fn write(lines: &mut Vec<u8>, number: u64, answer: &mut Published) {
    if !answer.error.is_empty() {
        answer.error.insert_str(0, &format!("line {number}: "));
    }
    lines.extend(serde_json::to_vec(answer).expect("an answer has texts and numbers"));
    lines.push(b'\n');
}

pub(in crate::ingress) async fn read_topic(Id(name): Id, call: Call) -> Answer {
    let request = json::topics::page_of_query(call.query()).map_err(Problem::bad_request)?;
    let page = call
        .state
        .api
        .read_topic(&call.caller, &name, &request)
        .await?;
    within(&call, &json::topics::Page::from(&page))
}

pub(in crate::ingress) async fn explain_record(Id(name): Id, call: Call) -> Answer {
    let place = json::topics::place_of_query(call.query());
    let (partition, offset) = place.map_err(Problem::bad_request)?;
    let api = &call.state.api;
    let explanation = api
        .explain_record(&call.caller, &name, partition, &offset)
        .await?;
    within(&call, &explanation)
}

/// Sends the records of a topic, and those that come later, as Server-Sent Events.
pub(in crate::ingress) async fn follow_topic(Id(name): Id, call: Call) -> Answer {
    let mut request = json::topics::page_of_query(call.query()).map_err(Problem::bad_request)?;
    if let Some(last) = last_event(&call.headers, None)? {
        request.from = read_from(&last).map_err(Problem::bad_request)?;
    }
    let Call { state, caller, .. } = call;
    let mut reading = Reading::default();
    let first = state.api.read_on(&caller, &name, &request, &mut reading);
    let first = first.await?;
    request.wait = BEAT;
    let follower = Follower {
        api: state.api,
        caller,
        name,
        request,
        reading,
        page: Some(first),
        stop: state.stop,
    };
    let events = stream::unfold(Some(follower), async |follower| {
        let mut follower = follower?;
        Some(match follower.next().await {
            Ok(events) => (events, Some(follower)),
            Err(end) => (end, None),
        })
    });
    Ok(event_stream(events))
}

struct Follower {
    api: Arc<Api>,
    caller: Caller,
    name: String,
    request: ReadTopic,
    reading: Reading,
    /// The first page, until it is sent.
    page: Option<TopicPage>,
    stop: CancellationToken,
}

impl Follower {
    /// Waits for the next events. The error is the last one.
    async fn next(&mut self) -> Result<Bytes, Bytes> {
        let end = |why: String| {
            let data = serde_json::json!({"reason": why});
            Bytes::from(format!("event: end\ndata: {data}\n\n"))
        };
        let page = match self.page.take() {
            Some(page) => page,
            None if self.stop.is_cancelled() => {
                return Err(end("taskd stops; go on after the last event".to_owned()));
            }
            None => {
                let read =
                    self.api
                        .read_on(&self.caller, &self.name, &self.request, &mut self.reading);
                read.await.map_err(|error| end(error.to_string()))?
            }
        };
        self.request.from = read_from(&page.next).map_err(end)?;
        if page.records.is_empty() {
            // Whoever begins at `$` goes on from here after a broken connection.
            return Ok(format!(": beat\nid: {}\n\n", page.next).into());
        }
        let mut position: BTreeMap<u32, Offset> = match read_from(&page.begin).map_err(end)? {
            ReadFrom::AfterEach(offsets) => offsets.into_iter().collect(),
            _ => BTreeMap::new(),
        };
        let mut events = String::new();
        for record in &page.records {
            position.insert(record.partition, record.offset);
            let id: Vec<String> = position
                .iter()
                .map(|(partition, offset)| format!("{partition}:{offset}"))
                .collect();
            let id = id.join(",");
            let data = serde_json::to_string(&json::topics::Shows::from(record));
            let data = data.map_err(|error| end(error.to_string()))?;
            events += &format!("id: {id}\nevent: record\ndata: {data}\n\n");
        }
        Ok(events.into())
    }
}
