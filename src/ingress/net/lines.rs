//! Splits a stream of bytes into lines.

use std::{io, sync::Arc};

use bytes::{Buf as _, Bytes, BytesMut};
use futures::{FutureExt as _, Stream, StreamExt as _};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::{
    codec::{Decoder, FramedRead},
    io::StreamReader,
};

/// A batch ends after this many bytes, however few lines it has.
const BATCH_BYTES: usize = 4 << 20;
/// How many bytes are read at a time.
const READ_BYTES: usize = 64 << 10;

/// One line without its end.
#[derive(Debug, PartialEq)]
pub struct Line {
    /// Counted from 1. Blank lines count, but are not returned.
    pub number: u64,
    pub text: Result<Bytes, TooLong>,
}

#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("longer than {0} bytes")]
pub struct TooLong(pub usize);

/// The lines of a stream.
pub struct Lines<S> {
    lines: FramedRead<StreamReader<S, Bytes>, LineDecoder>,
    /// An error that came after a batch, for the next call.
    failed: Option<io::Error>,
}

impl<S: Stream<Item = io::Result<Bytes>> + Unpin> Lines<S> {
    /// Splits `stream` into lines. A line longer than `max` is dropped while it is read. `dropped`
    /// gets the number of bytes of such lines, and of blank ones.
    pub fn new(stream: S, max: usize, dropped: impl FnMut(usize) + Send + 'static) -> Self {
        let dropped = Box::new(dropped);
        let begun = Arc::default();
        let decoder = LineDecoder {
            max,
            number: 0,
            searched: 0,
            is_too_long: false,
            consumed: 0,
            begun,
            dropped,
        };
        Self {
            lines: FramedRead::with_capacity(StreamReader::new(stream), decoder, READ_BYTES),
            failed: None,
        }
    }

    /// Waits for a line, and returns it with those that are ready after it, at most `max` in all.
    /// Returns none at the end of the stream. Cancel safe.
    pub async fn next_batch(&mut self, max: usize) -> io::Result<Vec<Line>> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let mut next = self.lines.next().await.transpose()?;
        while let Some(line) = next {
            bytes += line.text.as_ref().map_or(0, Bytes::len);
            batch.push(line);
            if batch.len() >= max || bytes >= BATCH_BYTES {
                break;
            }
            // Takes only what is ready: a client that sends a line now and then wants its answer at
            // once.
            next = match self.lines.next().now_or_never().flatten().transpose() {
                Ok(line) => line,
                Err(error) => {
                    self.failed = Some(error);
                    None
                }
            };
        }
        Ok(batch)
    }

    /// When the line began that has not ended yet.
    pub(in crate::ingress) fn begun(&self) -> Arc<Mutex<Option<Instant>>> {
        Arc::clone(&self.lines.decoder().begun)
    }

    /// The size of all lines that were returned since the last call, in bytes.
    pub fn take_consumed(&mut self) -> usize {
        std::mem::take(&mut self.lines.decoder_mut().consumed)
    }
}

/// Removes the byte order mark that some editors put at the beginning of a file: it belongs neither
/// to a key nor to JSON.
pub(in crate::ingress) fn without_mark(text: &mut Bytes) {
    const MARK: &[u8] = "\u{feff}".as_bytes();
    if text.starts_with(MARK) {
        text.advance(MARK.len());
    }
}

struct LineDecoder {
    max: usize,
    /// The number of lines so far.
    number: u64,
    /// How many bytes of the buffer contain no line end.
    searched: usize,
    /// True if the beginning of this line was dropped.
    is_too_long: bool,
    consumed: usize,
    begun: Arc<Mutex<Option<Instant>>>,
    dropped: Box<dyn FnMut(usize) + Send>,
}

impl LineDecoder {
    /// Takes a line of `length` bytes and the `end` bytes after it. Returns `None` if the line is
    /// blank.
    fn take(&mut self, buffer: &mut BytesMut, length: usize, end: usize) -> Option<Line> {
        self.number += 1;
        self.searched = 0;
        *self.begun.lock() = None;
        let mut text = buffer.split_to(length).freeze();
        buffer.advance(end);
        if self.number == 1 {
            without_mark(&mut text);
        }
        if std::mem::take(&mut self.is_too_long) || length > self.max {
            (self.dropped)(length + end);
            return Some(Line {
                number: self.number,
                text: Err(TooLong(self.max)),
            });
        }
        if text.iter().all(u8::is_ascii_whitespace) {
            (self.dropped)(length + end);
            return None;
        }
        self.consumed += length + end;
        if text.ends_with(b"\r") {
            text.truncate(text.len() - 1);
        }
        Some(Line {
            number: self.number,
            text: Ok(text),
        })
    }
}

impl Decoder for LineDecoder {
    type Item = Line;
    type Error = io::Error;

    fn decode(&mut self, buffer: &mut BytesMut) -> io::Result<Option<Line>> {
        while let Some(at) = buffer[self.searched..]
            .iter()
            .position(|byte| *byte == b'\n')
        {
            if let Some(line) = self.take(buffer, self.searched + at, 1) {
                return Ok(Some(line));
            }
        }
        self.searched = buffer.len();
        if self.is_too_long || buffer.len() > self.max {
            self.is_too_long = true;
            (self.dropped)(std::mem::take(&mut self.searched));
            buffer.clear();
        }
        if self.is_too_long || !buffer.is_empty() {
            self.begun.lock().get_or_insert_with(Instant::now);
        }
        Ok(None)
    }

    /// The last line may have no end.
    fn decode_eof(&mut self, buffer: &mut BytesMut) -> io::Result<Option<Line>> {
        let line = self.decode(buffer)?;
        if line.is_none() && (self.is_too_long || !buffer.is_empty()) {
            let length = buffer.len();
            return Ok(self.take(buffer, length, 0));
        }
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use futures::stream;

    use super::*;

    async fn lines(chunks: &[&'static str], max: usize) -> Vec<(u64, Option<String>)> {
        let chunks = chunks
            .iter()
            .map(|chunk| Ok(Bytes::from_static(chunk.as_bytes())));
        let mut lines = Lines::new(stream::iter(chunks.collect::<Vec<_>>()), max, drop);
        let mut all = Vec::new();
        while let [line] = &lines.next_batch(1).await.unwrap()[..] {
            let text = line
                .text
                .as_ref()
                .ok()
                .map(|text| String::from_utf8(text.to_vec()).unwrap());
            all.push((line.number, text));
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
        assert_eq!(
            lines(&["o", "ne\nt", "wo\r", "\n", "\nfo", "ur", "\n"], 9).await,
            whole
        );
        assert_eq!(lines(&[], 9).await, []);
    }

    #[tokio::test]
    async fn a_byte_order_mark_at_the_beginning_is_no_part_of_a_line() {
        assert_eq!(
            lines(&["\u{feff}one\r\n\u{feff}two"], 9).await,
            [line(1, "one"), line(2, "\u{feff}two")]
        );
        assert_eq!(lines(&["\u{feff}\r\ntwo"], 9).await, [line(2, "two")]);
        assert_eq!(lines(&["\u{feff}"], 9).await, []);
    }

    #[tokio::test]
    async fn a_long_line_is_dropped_and_the_next_one_is_not() {
        let expected = [(1, None), line(2, "ok"), (3, None)];
        assert_eq!(lines(&["123456\nok\n1234", "56"], 5).await, expected);
        assert_eq!(
            lines(&["123", "456", "789\nok\n", "1234567890"], 5).await,
            expected
        );
    }

    #[tokio::test]
    async fn of_a_stream_that_breaks_the_whole_lines_count_and_the_last_piece_does_not() {
        let chunks = [
            Ok(Bytes::from_static(b"one\ntw")),
            Err(io::Error::other("broken")),
        ];
        let mut lines = Lines::new(stream::iter(chunks), 9, drop);
        assert_eq!(lines.next_batch(10).await.unwrap().len(), 1);
        assert_eq!(
            lines.next_batch(10).await.unwrap_err().to_string(),
            "broken"
        );
        assert!(lines.next_batch(10).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn every_byte_is_consumed_or_dropped_once_and_dropped_at_once() {
        let chunks = [
            "one\n\n\ntw",
            "o\r\n123456789",
            "0",
            "12345",
            "\n \n",
            "\nend",
        ]
        .map(|chunk| Ok(chunk.into()));
        let dropped = Arc::new(AtomicUsize::new(0));
        let (dropping, seen) = (dropped.clone(), Arc::new(Mutex::new(Vec::new())));
        let (reading, before) = (seen.clone(), dropped.clone());
        let chunks =
            stream::iter(chunks).inspect(move |_| reading.lock().push(before.load(Relaxed)));
        let count = move |bytes| {
            dropping.fetch_add(bytes, Relaxed);
        };
        let (mut lines, mut consumed) = (Lines::new(chunks, 9, count), Vec::new());
        while !lines.next_batch(1).await.unwrap().is_empty() {
            consumed.push(lines.take_consumed());
        }
        assert_eq!((consumed, dropped.load(Relaxed)), (vec![4, 5, 0, 3], 21));
        assert_eq!(*seen.lock(), [0, 2, 2, 12, 17, 20], "before each chunk");
    }

    #[tokio::test]
    async fn a_line_begins_with_its_first_byte() {
        let (sender, receiver) = tokio::sync::mpsc::channel::<io::Result<Bytes>>(8);
        let mut lines = Lines::new(
            tokio_stream::wrappers::ReceiverStream::new(receiver),
            4,
            drop,
        );
        let begun = lines.begun();
        // Each part, and whether a line has begun then. The last but one is too long.
        for (part, has_begun) in [
            ("\n", false),
            ("a", true),
            ("b", true),
            ("\n", false),
            ("\nx\n12345", true),
            ("6", true),
        ] {
            sender.send(Ok(part.into())).await.unwrap();
            while lines.next_batch(2).now_or_never().is_some() {}
            assert_eq!(begun.lock().is_some(), has_begun, "{part:?}");
        }
        let first = *begun.lock();
        sender.send(Ok("7".into())).await.unwrap();
        assert!(lines.next_batch(2).now_or_never().is_none());
        assert_eq!(
            *begun.lock(),
            first,
            "it does not begin again with each byte"
        );
    }

    #[tokio::test]
    async fn a_batch_takes_what_is_there_and_waits_for_nothing_more() {
        let (sender, receiver) = tokio::sync::mpsc::channel::<io::Result<Bytes>>(8);
        let mut lines = Lines::new(
            tokio_stream::wrappers::ReceiverStream::new(receiver),
            99,
            drop,
        );
        sender.send(Ok("a\nb\nc".into())).await.unwrap();
        assert_eq!(lines.next_batch(10).await.unwrap().len(), 2);
        sender.send(Ok("\nd\ne\n".into())).await.unwrap();
        assert_eq!(lines.next_batch(2).await.unwrap().len(), 2);
        assert_eq!(lines.next_batch(2).await.unwrap()[0].number, 5);
        drop(sender);
        assert!(lines.next_batch(2).await.unwrap().is_empty());
    }
}
