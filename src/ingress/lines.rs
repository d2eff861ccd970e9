//! A stream of bytes as lines. Lines that stand within one chunk are slices of it.

use bytes::{Bytes, BytesMut};
use futures::{FutureExt, Stream, StreamExt};

/// A batch ends at so many bytes, however few lines they are.
const BATCH_BYTES: usize = 4 << 20;

/// One line without its end. Blank ones are left out, but counted.
#[derive(Debug, PartialEq)]
pub struct Line {
    /// From 1.
    pub number: u64,
    pub text: Result<Bytes, TooLong>,
}

#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("longer than {0} bytes")]
pub struct TooLong(pub usize);

/// Splits `stream`; a line longer than `max` is dropped while it is read.
pub struct Lines<S, E> {
    stream: S,
    max: usize,
    /// What has been read and not been looked at.
    chunk: Bytes,
    /// The beginning of a line whose end has not been read.
    partial: BytesMut,
    /// The beginning was dropped because it was too long.
    too_long: bool,
    number: u64,
    ended: bool,
    /// Met while a batch was gathered; for the next call.
    failed: Option<E>,
    /// Bytes that came in.
    received: usize,
}

impl<S, E> Lines<S, E>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    pub fn new(stream: S, max: usize) -> Self {
        let (chunk, partial) = (Bytes::new(), BytesMut::new());
        Self { stream, max, chunk, partial, too_long: false, number: 0, ended: false, failed: None, received: 0 }
    }

    /// The next line; `None` at the end. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<Line>, E> {
        loop {
            if let Some(line) = self.line_of_chunk() {
                return Ok(Some(line));
            }
            if let Some(error) = self.failed.take() {
                return Err(error);
            }
            if self.ended {
                return Ok(None);
            }
            match self.stream.next().await {
                Some(Ok(chunk)) => {
                    self.received += chunk.len();
                    self.chunk = chunk;
                }
                Some(Err(error)) => {
                    // The line that was being read is not a line: nobody knows how it goes on.
                    self.ended = true;
                    self.partial = BytesMut::new();
                    return Err(error);
                }
                None => {
                    self.ended = true;
                    let unfinished = self.too_long || !self.partial.is_empty();
                    return Ok(if unfinished { self.end_line(Bytes::new()) } else { None });
                }
            }
        }
    }

    /// Waits for a line, and takes those that are there behind it: at most `max`. Empty at the end. Cancel safe.
    pub async fn next_batch(&mut self, max: usize) -> Result<Vec<Line>, E> {
        let Some(first) = self.next().await? else { return Ok(Vec::new()) };
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let mut next = Some(first);
        while let Some(line) = next {
            bytes += line.text.as_ref().map_or(0, Bytes::len);
            batch.push(line);
            if batch.len() >= max || bytes >= BATCH_BYTES {
                break;
            }
            // Only what needs no waiting: whoever sends a line now and then wants its answer now.
            next = match self.next().now_or_never() {
                Some(Ok(line)) => line,
                Some(Err(error)) => {
                    self.failed = Some(error);
                    None
                }
                None => None,
            };
        }
        Ok(batch)
    }

    /// The bytes of all that was returned, or left out, since the last call.
    pub fn take_consumed(&mut self) -> usize {
        let held = self.chunk.len() + self.partial.len();
        std::mem::replace(&mut self.received, held) - held
    }

    fn line_of_chunk(&mut self) -> Option<Line> {
        while !self.chunk.is_empty() {
            let Some(at) = self.chunk.iter().position(|byte| *byte == b'\n') else {
                self.keep_beginning();
                return None;
            };
            let text = self.chunk.split_to(at);
            self.chunk = self.chunk.slice(1..);
            if let Some(line) = self.end_line(text) {
                return Some(line);
            }
        }
        None
    }

    fn keep_beginning(&mut self) {
        let chunk = std::mem::take(&mut self.chunk);
        if self.too_long || self.partial.len() + chunk.len() > self.max {
            self.too_long = true;
            self.partial = BytesMut::new();
        } else {
            self.partial.extend_from_slice(&chunk);
        }
    }

    fn end_line(&mut self, end: Bytes) -> Option<Line> {
        self.number += 1;
        let too_long = std::mem::take(&mut self.too_long) || self.partial.len() + end.len() > self.max;
        let mut text = if self.partial.is_empty() {
            end
        } else {
            let mut text = std::mem::take(&mut self.partial);
            text.extend_from_slice(&end);
            text.freeze()
        };
        if too_long {
            return Some(Line { number: self.number, text: Err(TooLong(self.max)) });
        }
        if text.ends_with(b"\r") {
            text.truncate(text.len() - 1);
        }
        let blank = text.iter().all(u8::is_ascii_whitespace);
        (!blank).then_some(Line { number: self.number, text: Ok(text) })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream;

    use super::*;

    async fn lines(chunks: &[&'static str], max: usize) -> Vec<(u64, Option<String>)> {
        let chunks = chunks.iter().map(|chunk| Ok::<_, Infallible>(Bytes::from_static(chunk.as_bytes())));
        let mut lines = Lines::new(stream::iter(chunks.collect::<Vec<_>>()), max);
        let mut all = Vec::new();
        while let Ok(Some(line)) = lines.next().await {
            all.push((line.number, line.text.ok().map(|text| String::from_utf8(text.to_vec()).unwrap())));
        }
        all
    }

    fn line(number: u64, text: &str) -> (u64, Option<String>) {
        (number, Some(text.into()))
    }

    #[tokio::test]
    async fn lines_are_found_wherever_chunks_end() {
        let whole = [line(1, "one"), line(2, "two"), line(4, "four")];
        assert_eq!(lines(&["one\ntwo\r\n\nfour"], 9).await, whole);
        assert_eq!(lines(&["o", "ne\nt", "wo\r", "\n", "\nfo", "ur", "\n"], 9).await, whole);
        assert_eq!(lines(&[], 9).await, []);
    }

    #[tokio::test]
    async fn a_long_line_is_dropped_and_the_next_one_is_not() {
        let expected = [(1, None), line(2, "ok"), (3, None)];
        assert_eq!(lines(&["123456\nok\n1234", "56"], 5).await, expected);
        assert_eq!(lines(&["123", "456", "789\nok\n", "1234567890"], 5).await, expected);
    }

    #[tokio::test]
    async fn of_a_stream_that_breaks_the_whole_lines_count_and_the_last_piece_does_not() {
        let chunks = [Ok(Bytes::from_static(b"one\ntw")), Err("broken")];
        let mut lines = Lines::new(stream::iter(chunks), 9);
        assert_eq!(lines.next_batch(10).await.unwrap().len(), 1);
        assert_eq!(lines.next_batch(10).await, Err("broken"));
        assert_eq!(lines.next_batch(10).await, Ok(Vec::new()));
    }

    #[tokio::test]
    async fn every_byte_is_consumed_once() {
        let chunks = ["one\n\n\ntw", "o\r\n123456789", "0\nend"].map(|chunk| Ok::<_, Infallible>(chunk.into()));
        let mut lines = Lines::new(stream::iter(chunks), 9);
        let mut consumed = Vec::new();
        while let Ok(Some(_)) = lines.next().await {
            consumed.push(lines.take_consumed());
        }
        assert_eq!(consumed, [4, 7, 11, 3], "the blank lines with the one behind them");
    }

    #[tokio::test]
    async fn a_batch_takes_what_is_there_and_waits_for_nothing_more() {
        let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Bytes, Infallible>>(8);
        let mut lines = Lines::new(tokio_stream::wrappers::ReceiverStream::new(receiver), 99);
        sender.send(Ok("a\nb\nc".into())).await.unwrap();
        assert_eq!(lines.next_batch(10).await.unwrap().len(), 2);
        sender.send(Ok("\nd\ne\n".into())).await.unwrap();
        assert_eq!(lines.next_batch(2).await.unwrap().len(), 2);
        assert_eq!(lines.next_batch(2).await.unwrap()[0].number, 5);
        drop(sender);
        assert!(lines.next_batch(2).await.unwrap().is_empty());
    }
}
