//! `taskd events`: prints topic `events` as JSON lines.

use std::{str::FromStr, time::Duration};

use anyhow::{Context as _, bail};
use clap::Args;

use super::print::{print_one, say};
use crate::{
    app,
    bus::{Log, LogMessage, Logs},
    config::{Options, Settings},
    model::Offset,
    wire::{own_topics::event_json, read_event_record},
};

/// The most records to read at once.
const AT_ONCE: usize = 500;
/// How often to look for new events.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Print what happened to the tasks of queues with events = true, as JSON lines
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd events                            all events that the topic still has
  taskd events --from now --follow        what happens from now on
  taskd events --from 1764230400000-0     what came after this offset
  taskd events --follow | jq -r 'select(.status == \"DEAD\") | .key'

It reads the topic from Redis or Kafka, not from taskd: --config, --redis-url, --bus-url or --data-dir say where it is, \
as they do for taskd. Each line has its offset, so that a later call can go on after it. An event may come again, \
with the same number.

Exit code: 0 at the end of the topic, 2 if it cannot be read, or if the offset is gone.")]
pub struct Events {
    /// Where to begin: beginning, now, or after an offset; with several partitions as
    /// PARTITION:OFFSET, with commas between them
    #[arg(long, value_name = "WHERE", default_value = "beginning")]
    from: From,

    /// Go on with the events that come later
    #[arg(long, short)]
    follow: bool,

    #[command(flatten)]
    pub(super) options: Options,
}

#[derive(Clone, Debug, PartialEq)]
enum From {
    Beginning,
    Now,
    After(Vec<(u32, Offset)>),
}

impl FromStr for From {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "beginning" => return Ok(Self::Beginning),
            "now" => return Ok(Self::Now),
            _ => {}
        }
        let wrong = || {
            format!(
                "{text:?} is neither beginning, now nor an offset; the lines have offsets, such as 1764230400000-0"
            )
        };
        let mut after = Vec::new();
        for part in text.split(',') {
            let (partition, offset) = part.split_once(':').unwrap_or(("0", part));
            let partition = partition.parse().map_err(|_| wrong())?;
            let offset = offset.parse().map_err(|_| wrong())?;
            after.push((partition, offset));
        }
        Ok(Self::After(after))
    }
}

pub(super) async fn run(args: Events, settings: Settings) -> anyhow::Result<()> {
    let bus = app::open_events(&settings).await?;
    let printed = print_all(&*bus.logs(), &args).await;
    bus.close().await;
    match printed {
        // A closed stdout is not an error: the reader has read enough.
        Err(error)
            if error
                .downcast_ref::<super::print::Unwritten>()
                .is_some_and(super::print::Unwritten::is_closed) =>
        {
            Ok(())
        }
        printed => printed,
    }
}

async fn print_all(logs: &dyn Logs, args: &Events) -> anyhow::Result<()> {
    let log = &Log::EVENTS;
    let ends = logs.ends(log).await?;
    let mut after = match &args.from {
        From::Beginning => vec![None; ends.len()],
        From::Now => ends.clone(),
        From::After(offsets) => after(logs, offsets, &ends).await?,
    };
    loop {
        let mut is_over = true;
        for (partition, after) in (0..).zip(&mut after) {
            for message in logs.read(log, partition, *after, AT_ONCE).await? {
                tell(&message)?;
                *after = Some(message.offset);
                is_over = false;
            }
        }
        // Without `--follow`, events that came meanwhile do not count.
        let is_read = after.iter().zip(&ends).all(|(read, end)| read >= end);
        if !args.follow && (is_read || is_over) {
            return Ok(());
        }
        if is_over {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// Returns the offset to begin after for each partition. Fails if the topic no longer has
/// everything after one of `offsets`.
async fn after(
    logs: &dyn Logs,
    offsets: &[(u32, Offset)],
    ends: &[Option<Offset>],
) -> anyhow::Result<Vec<Option<Offset>>> {
    let starts = logs.first(&Log::EVENTS).await?;
    let mut after = vec![None; ends.len()];
    for (partition, offset) in offsets {
        let place = *partition as usize;
        let Some(start) = starts.get(place) else {
            bail!(
                "there is no partition {partition}: topic events has {}, counted from 0",
                starts.len()
            );
        };
        match (start, ends[place]) {
            (Some(start), Some(end)) if offset < start || *offset > end => bail!(
                "offset {offset} is gone: partition {partition} has the events {start} to {end}; --from beginning \
                 prints these"
            ),
            (None, _) if *offset != Offset::default() => bail!(
                "offset {offset} is gone: partition {partition} has no events now; --from now --follow waits for them"
            ),
            _ => {}
        }
        after[place] = Some(*offset);
    }
    Ok(after)
}

fn tell(message: &LogMessage) -> anyhow::Result<()> {
    let offset = message.offset;
    let read = read_event_record(&message.record.value);
    let (number, event) = match read {
        Ok(read) => read,
        // Another program may have written the record.
        Err(why) => {
            say(format_args!(
                "taskd: the record at {offset} is no event: {why}"
            ));
            return Ok(());
        }
    };
    let mut line = event_json(number, &event);
    line["partition"] = message.record.partition.into();
    line["offset"] = offset.to_string().into();
    print_one(line).context("cannot print an event")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_is_a_word_or_offsets() {
        let at = |major, minor| Offset { major, minor };
        for (text, from) in [
            ("beginning", From::Beginning),
            ("now", From::Now),
            ("17-3", From::After(vec![(0, at(17, 3))])),
            ("1:5,0:7", From::After(vec![(1, at(5, 0)), (0, at(7, 0))])),
        ] {
            assert_eq!(text.parse(), Ok(from), "{text}");
        }
        for wrong in ["", "yesterday", "1:", ":1", "1-2-3"] {
            let why = wrong.parse::<From>().unwrap_err();
            assert!(
                why.contains("neither beginning, now nor an offset"),
                "{why}"
            );
        }
    }
}
