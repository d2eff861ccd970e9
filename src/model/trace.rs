//! Trace contexts in the W3C format: `00-<trace>-<span>-<flags>`.

use std::{fmt, str::FromStr};

use sha2::{Digest, Sha256};

/// A trace, and the span in it that is to be the parent of the next span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceContext {
    pub trace: TraceId,
    pub span: SpanId,
    pub flags: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceId(pub [u8; 16]);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId(pub [u8; 8]);

/// The flag that says that somebody records this trace.
const SAMPLED: u8 = 1;
/// The length of a traceparent of version 00.
const TEXT_BYTES: usize = 55;

impl TraceContext {
    /// Parses the context, and returns it if it is sampled. Most contexts are not, so this checks
    /// one byte first.
    pub fn sampled(traceparent: &str) -> Option<Self> {
        // The last hex digit of the flags. In later versions of the format, more may follow.
        let is_sampled = traceparent
            .as_bytes()
            .get(TEXT_BYTES - 1)
            .is_some_and(|last| hex_digit(*last) & SAMPLED == 1);
        is_sampled.then(|| traceparent.parse().ok()).flatten()
    }

    /// The context of a task whose caller gave none. It is not sampled, and it need not be stored,
    /// because it is derived from the id.
    ///
    /// The trace id is the task's id, which is a UUIDv7. The span id is its second half, which is
    /// random.
    pub fn of_id(id: &[u8; 16]) -> Self {
        let [.., a, b, c, d, e, f, g, h] = *id;
        Self {
            trace: TraceId(*id),
            span: SpanId([a, b, c, d, e, f, g, h]),
            flags: 0,
        }
    }

    /// This trace with another span.
    pub fn at(self, span: SpanId) -> Self {
        Self { span, ..self }
    }
}

/// The traceparent does not have the W3C format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a traceparent")]
pub struct InvalidContext;

impl FromStr for TraceContext {
    type Err = InvalidContext;

    fn from_str(text: &str) -> Result<Self, InvalidContext> {
        if !is_traceparent(text) {
            return Err(InvalidContext);
        }
        let mut parts = text.split('-').skip(1);
        let mut next = || parts.next().ok_or(InvalidContext);
        let trace = TraceId(bytes(next()?)?);
        let span = SpanId(bytes(next()?)?);
        let flags = bytes::<1>(next()?)?;
        Ok(Self {
            trace,
            span,
            flags: flags[0],
        })
    }
}

impl fmt::Display for TraceContext {
    /// Formats the context in one write, because this runs for each leased task.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = [b'-'; TEXT_BYTES];
        write_hex(&[0], &mut text[..2]);
        write_hex(&self.trace.0, &mut text[3..35]);
        write_hex(&self.span.0, &mut text[36..52]);
        write_hex(&[self.flags], &mut text[53..]);
        f.write_str(str::from_utf8(&text).map_err(|_| fmt::Error)?)
    }
}

/// True if the text is a valid W3C traceparent.
pub fn is_traceparent(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let hex = |part: &str, len: usize| {
        part.len() == len && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    let id = |part: &str, len: usize| hex(part, len) && part.bytes().any(|b| b != b'0');
    // Version 00 has four parts, later versions may have more, and W3C forbids version ff.
    let ends = parts.len() == 4 || (parts.len() > 4 && parts[0] != "00");
    let is_text = text.bytes().all(|b| b.is_ascii_graphic());
    ends && is_text
        && hex(parts[0], 2)
        && parts[0] != "ff"
        && id(parts[1], 32)
        && id(parts[2], 16)
        && hex(parts[3], 2)
}

impl SpanId {
    /// A span id that several processes can derive independently: equal parts yield equal ids.
    pub fn derived(of: TraceContext, hop: &str, parts: &[&[u8]]) -> Self {
        let mut hash = Sha256::new()
            .chain_update(of.trace.0)
            .chain_update(of.span.0)
            .chain_update(hop);
        for part in parts {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        let mut id = [0; 8];
        id.copy_from_slice(&hash.finalize()[..8]);
        // W3C forbids an id of zeros.
        id[7] |= u8::from(id == [0; 8]);
        Self(id)
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The trace of a lease, which is part of its token, so that any process that receives the report
/// knows the worker's span without a lookup.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseTrace {
    /// The span of the work, which is the parent of the worker's spans.
    pub work: TraceContext,
    /// The span of the task's first attempt, if this is a later one.
    pub first: Option<SpanId>,
    /// By the clock of the machine that leased the task.
    pub leased_unix_us: u64,
}

/// `<trace><span><flags>-<microseconds>`, optionally followed by `-<first span>`, all in hex.
impl fmt::Display for LeaseTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TraceContext { trace, span, flags } = self.work;
        write!(f, "{trace}{span}{flags:02x}-{:x}", self.leased_unix_us)?;
        self.first.map_or(Ok(()), |first| write!(f, "-{first}"))
    }
}

impl FromStr for LeaseTrace {
    type Err = InvalidContext;

    fn from_str(text: &str) -> Result<Self, InvalidContext> {
        let mut parts = text.split('-');
        let mut next = || parts.next();
        let ids: [u8; 25] = bytes(next().ok_or(InvalidContext)?)?;
        let leased =
            u64::from_str_radix(next().ok_or(InvalidContext)?, 16).map_err(|_| InvalidContext)?;
        let first = next().map(bytes).transpose()?.map(SpanId);
        if next().is_some() {
            return Err(InvalidContext);
        }
        let mut trace = [0; 16];
        let mut span = [0; 8];
        trace.copy_from_slice(&ids[..16]);
        span.copy_from_slice(&ids[16..24]);
        let work = TraceContext {
            trace: TraceId(trace),
            span: SpanId(span),
            flags: ids[24],
        };
        Ok(Self {
            work,
            first,
            leased_unix_us: leased,
        })
    }
}

/// Writes bytes as lower-case hex.
fn write_hex(bytes: &[u8], hex: &mut [u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (byte, pair) in bytes.iter().zip(hex.chunks_exact_mut(2)) {
        pair.copy_from_slice(&[
            DIGITS[usize::from(byte >> 4)],
            DIGITS[usize::from(byte & 15)],
        ]);
    }
}

/// Reads lower-case hex of exactly `N` bytes.
fn bytes<const N: usize>(hex: &str) -> Result<[u8; N], InvalidContext> {
    let mut bytes = [0; N];
    if hex.len() != 2 * N {
        return Err(InvalidContext);
    }
    for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        let high = hex_digit(pair[0]);
        let low = hex_digit(pair[1]);
        if high > 15 || low > 15 {
            return Err(InvalidContext);
        }
        *byte = high << 4 | low;
    }
    Ok(bytes)
}

/// The value of a hex digit, or an even number above 15 for any other byte.
fn hex_digit(byte: u8) -> u8 {
    match byte {
        b'0'..=b'9' => byte - b'0',
        b'a'..=b'f' => byte - b'a' + 10,
        _ => 0xfe,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_context_survives_its_text() {
        let context: TraceContext = SAMPLED.parse().unwrap();
        assert_eq!(context.to_string(), SAMPLED);
        assert_eq!(TraceContext::sampled(SAMPLED), Some(context));
        let random = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03";
        assert!(TraceContext::sampled(random).is_some());
    }

    #[test]
    fn a_context_that_is_not_sampled_is_none() {
        for text in [
            "",
            "1",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-02",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0g",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceContext::sampled(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_trace_of_a_lease_survives_its_text() {
        let work = SAMPLED.parse().unwrap();
        let trace = LeaseTrace {
            work,
            first: None,
            leased_unix_us: 1_700_000_000_123_456,
        };
        let text = trace.to_string();
        assert_eq!(
            text,
            "0af7651916cd43dd8448eb211c80319cb7ad6b716920333101-60a2418202240"
        );
        assert_eq!(text.parse(), Ok(trace.clone()));
        let retry = LeaseTrace {
            first: Some(SpanId([7; 8])),
            ..trace
        };
        assert_eq!(retry.to_string().parse(), Ok(retry));
        for wrong in [
            "",
            "9",
            &text[1..],
            &text[..50],
            &format!("{text}-7"),
            &format!("{text}-{:016x}-1", 7),
        ] {
            assert_eq!(
                wrong.parse::<LeaseTrace>(),
                Err(InvalidContext),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn derived_spans_differ_by_each_part() {
        let of: TraceContext = SAMPLED.parse().unwrap();
        let derived = |hop: &str, parts: &[&[u8]]| SpanId::derived(of, hop, parts);
        assert_eq!(
            derived("work", &[b"a", b"b"]),
            derived("work", &[b"a", b"b"])
        );
        let all = [
            derived("work", &[b"a", b"b"]),
            derived("work", &[b"ab"]),
            derived("claim", &[b"a", b"b"]),
        ];
        assert!(all[0] != all[1] && all[0] != all[2] && all[1] != all[2]);
    }
}
