//! The last step of a claim: how its answer gets to the worker.
//!
//! A handler puts the [`Deliveries`] of its answer into the response's extensions. [`ship`] moves
//! them into the response's body, which counts its pieces. When the last piece has been written to
//! the socket, the deliveries move on to the [`Record`] of the connection, and the next flush
//! confirms them. If anything breaks before that, they are dropped, which gives the leases back at
//! no cost. While a connection carries deliveries, each write first checks that the client is still
//! there.

use std::{
    any::Any,
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use axum::http::Response;
use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::budget::Share;
use crate::queue::Delivery;

/// The leases that a response carries to its worker. Dropping them gives them back.
#[derive(Clone, Default)]
pub(in crate::ingress) struct Deliveries(Arc<Mutex<Vec<Delivery>>>);

impl From<Vec<Delivery>> for Deliveries {
    fn from(deliveries: Vec<Delivery>) -> Self {
        Self(Arc::new(Mutex::new(deliveries)))
    }
}

impl Deliveries {
    fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    fn take(&self) -> Vec<Delivery> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// The leases and the memory of one message of a stream.
#[derive(Default)]
pub(in crate::ingress) struct Cargo {
    pub(in crate::ingress) deliveries: Vec<Delivery>,
    pub(in crate::ingress) rooms: Vec<Box<dyn Any + Send>>,
}

impl Cargo {
    fn is_empty(&self) -> bool {
        self.deliveries.is_empty() && self.rooms.is_empty()
    }
}

/// The cargo of the messages that a stream has just passed to its encoder. It goes with the next
/// piece of the body.
#[derive(Clone, Default)]
pub(in crate::ingress) struct Loading(Arc<Mutex<Cargo>>);

impl Loading {
    pub(in crate::ingress) fn load(
        &self,
        deliveries: Vec<Delivery>,
        room: Option<Box<dyn Any + Send>>,
    ) {
        let mut cargo = self.0.lock();
        cargo.deliveries.extend(deliveries);
        cargo.rooms.extend(room);
    }

    fn take(&self) -> Cargo {
        std::mem::take(&mut *self.0.lock())
    }
}

/// The state of one connection: deliveries that wait for a flush, answers that the client has not
/// read, requests in flight.
#[derive(Default)]
pub(in crate::ingress) struct Record {
    written: Mutex<Vec<Delivery>>,
    /// The number of unwritten answers with deliveries.
    carried: AtomicUsize,
    /// The number of the next answer.
    next: AtomicU64,
    /// Answers by their numbers.
    unread: Mutex<HashMap<u64, Unread>>,
    in_hand: watch::Sender<usize>,
}

/// A client that has taken nothing of its answer for this long counts as gone. This is shorter than
/// the default lease, so the client does not cost an attempt.
pub(in crate::ingress) const WRITE_TIMEOUT: Duration = Duration::from_secs(20);
/// How often a client is checked: has it begun to send, and does it read its answers?
pub(in crate::ingress) const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long, at most, a client should take to read what waits of an answer.
const ANSWER_TIME: Duration = Duration::from_secs(120);
/// How many bytes of a large answer a client must read between two checks, however much of it is
/// left.
const ENOUGH_PER_LOOK: usize = 64 << 10;

/// The pieces of one answer that the HTTP library holds. HTTP/2 holds them until the client's
/// window allows them.
struct Unread {
    pieces: usize,
    /// The bytes of these pieces that the socket has not taken.
    waiting: usize,
    /// The bytes that the socket must take within [`WRITE_TIMEOUT`] after `since`.
    wanted: usize,
    since: Instant,
}

impl Unread {
    fn new() -> Self {
        Self {
            pieces: 0,
            waiting: 0,
            wanted: 0,
            since: Instant::now(),
        }
    }

    fn piece_waits(&mut self, bytes: usize) {
        self.pieces += 1;
        self.waiting += bytes;
        if self.wanted == 0 {
            self.ask_for_more();
        }
    }

    fn bytes_move(&mut self, count: usize) {
        self.waiting = self.waiting.saturating_sub(count);
        self.wanted = self.wanted.saturating_sub(count);
        if self.wanted == 0 {
            self.ask_for_more();
        }
    }

    /// Begins the next period. A single byte is not enough: a client that reads byte by byte would
    /// hold its tasks, and memory of the budget, for ever.
    fn ask_for_more(&mut self) {
        self.since = Instant::now();
        let looks = WRITE_TIMEOUT.as_secs() / LOOK_EVERY.as_secs();
        let in_time = self.waiting
            / usize::try_from(ANSWER_TIME.as_secs() / WRITE_TIMEOUT.as_secs()).unwrap_or(1);
        self.wanted = in_time
            .min(ENOUGH_PER_LOOK * usize::try_from(looks).unwrap_or(1))
            .max(1);
    }
}

impl Record {
    /// Takes the deliveries whose answers were written to the socket since the last call.
    pub(in crate::ingress) fn take_written(&self) -> Vec<Delivery> {
        std::mem::take(&mut *self.written.lock())
    }

    /// True while an answer with deliveries is on its way.
    pub(in crate::ingress) fn is_carrying(&self) -> bool {
        self.carried.load(Ordering::Acquire) > 0
    }

    /// True if the client reads an answer too slowly.
    pub(in crate::ingress) fn has_unread(&self) -> bool {
        self.unread()
            .values()
            .any(|answer| answer.since.elapsed() >= WRITE_TIMEOUT)
    }

    fn unread(&self) -> MutexGuard<'_, HashMap<u64, Unread>> {
        self.unread.lock()
    }

    /// Counts a request until its answer is written or lost. [`Self::idle`] waits for it if
    /// `is_awaited`.
    pub(in crate::ingress) fn begin(self: &Arc<Self>, is_awaited: bool) -> InHand {
        let counts = usize::from(is_awaited);
        self.in_hand.send_if_modified(|count| {
            *count += counts;
            false
        });
        InHand {
            record: Arc::clone(self),
            counts,
        }
    }

    /// Waits until no awaited request is in flight.
    pub(in crate::ingress) async fn idle(&self) {
        // The sender is in `self`, so the wait cannot fail.
        drop(self.in_hand.subscribe().wait_for(|count| *count == 0).await);
    }
}

/// A request in flight.
pub(in crate::ingress) struct InHand {
    record: Arc<Record>,
    /// 1 for an awaited request, 0 for any other.
    counts: usize,
}

impl Drop for InHand {
    fn drop(&mut self) {
        // Notifies only when the last one ends.
        self.record.in_hand.send_if_modified(|count| {
            *count -= self.counts;
            *count == 0
        });
    }
}

/// Gives the response a body that notices when it has been written. Until then the answer holds the
/// memory that the handler reserved, or that of its request.
pub(in crate::ingress) fn ship<B: Body<Data = Bytes> + Unpin>(
    mut response: Response<B>,
    in_hand: InHand,
    request: Share,
) -> Response<Shipped<B>> {
    let deliveries = response
        .extensions_mut()
        .remove::<Deliveries>()
        .unwrap_or_default();
    let loading = response.extensions_mut().remove::<Loading>();
    let room = response
        .extensions_mut()
        .remove::<Share>()
        .unwrap_or_else(|| {
            if let Some(bytes) = response.body().size_hint().exact() {
                request.become_answer(usize::try_from(bytes).unwrap_or(usize::MAX));
            }
            request
        });
    if !deliveries.is_empty() {
        in_hand.record.carried.fetch_add(1, Ordering::AcqRel);
    }
    let (parts, is_broken) = (AtomicUsize::new(1), AtomicBool::new(false));
    let number = in_hand.record.next.fetch_add(1, Ordering::Relaxed);
    let shipment = Shipment {
        number,
        deliveries,
        parts,
        is_broken,
        in_hand,
        _room: room,
    };
    response.map(|inner| Shipped {
        inner,
        shipment: Arc::new(shipment),
        loading,
        ended: false,
    })
}

/// One answer on its way to the client.
struct Shipment {
    number: u64,
    deliveries: Deliveries,
    /// The number of pieces that are not written yet, plus one for the body until it ends.
    parts: AtomicUsize,
    is_broken: AtomicBool,
    in_hand: InHand,
    /// The answer's part of the budget.
    _room: Share,
}

impl Shipment {
    fn piece_waits(&self, bytes: usize) {
        self.parts.fetch_add(1, Ordering::AcqRel);
        let mut unread = self.in_hand.record.unread();
        unread
            .entry(self.number)
            .or_insert_with(Unread::new)
            .piece_waits(bytes);
    }

    fn piece_moves(&self, count: usize) {
        if let Some(answer) = self.in_hand.record.unread().get_mut(&self.number) {
            answer.bytes_move(count);
        }
    }

    /// Removes a piece. `lost` is the number of its bytes that the socket did not take.
    fn piece_leaves(&self, lost: usize) {
        let mut unread = self.in_hand.record.unread();
        if let Some(answer) = unread.get_mut(&self.number) {
            answer.pieces -= 1;
            answer.waiting = answer.waiting.saturating_sub(lost);
            if answer.pieces == 0 {
                unread.remove(&self.number);
            }
        }
    }

    fn part_left(&self) {
        let is_last = self.parts.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last && !self.is_broken.load(Ordering::Acquire) {
            let mut written = self.in_hand.record.written.lock();
            written.append(&mut self.unload());
        }
    }

    fn part_lost(&self) {
        self.is_broken.store(true, Ordering::Release);
        drop(self.unload());
    }

    /// Takes the deliveries out, so that the connection no longer carries them.
    fn unload(&self) -> Vec<Delivery> {
        let deliveries = self.deliveries.take();
        if !deliveries.is_empty() {
            self.in_hand.record.carried.fetch_sub(1, Ordering::AcqRel);
        }
        deliveries
    }
}

/// A body that counts its written pieces.
pub(in crate::ingress) struct Shipped<B: Body> {
    inner: B,
    shipment: Arc<Shipment>,
    /// For a stream only.
    loading: Option<Loading>,
    ended: bool,
}

impl<B: Body> Shipped<B> {
    /// Ends the body, before the last piece is handed out, because a flush may follow at once.
    fn end(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.shipment.part_left();
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Shipped<B> {
    type Data = Piece;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece>, B::Error>>> {
        let Some(frame) = ready!(Pin::new(&mut self.inner).poll_frame(cx)?) else {
            self.end();
            return Poll::Ready(None);
        };
        let is_last = frame.is_trailers() || self.inner.is_end_stream();
        let cargo = self.loading.as_ref().map(Loading::take).unwrap_or_default();
        let frame = frame.map_data(|bytes| Piece::new(bytes, &self.shipment, cargo));
        if is_last {
            self.end();
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl<B: Body> Drop for Shipped<B> {
    fn drop(&mut self) {
        // The HTTP library does not poll an empty body.
        if self.inner.is_end_stream() {
            self.end();
        }
        if !self.ended {
            self.shipment.part_lost();
        }
    }
}

/// Bytes on the way to the socket. The HTTP library drops them when they have been written or lost.
pub(in crate::ingress) struct Piece {
    bytes: Bytes,
    shipment: Arc<Shipment>,
    /// The cargo of the stream messages in this piece.
    cargo: Cargo,
}

impl Piece {
    fn new(bytes: Bytes, shipment: &Arc<Shipment>, cargo: Cargo) -> Self {
        shipment.piece_waits(bytes.len());
        if !cargo.deliveries.is_empty() {
            shipment
                .in_hand
                .record
                .carried
                .fetch_add(1, Ordering::AcqRel);
        }
        Self {
            bytes,
            shipment: Arc::clone(shipment),
            cargo,
        }
    }

    /// Takes the cargo out: it is confirmed by the next flush if the piece was written, and dropped
    /// otherwise.
    fn unload(&mut self) {
        if self.cargo.is_empty() {
            return;
        }
        let Cargo {
            mut deliveries,
            rooms: _,
        } = std::mem::take(&mut self.cargo);
        let record = &self.shipment.in_hand.record;
        if !deliveries.is_empty() {
            record.carried.fetch_sub(1, Ordering::AcqRel);
        }
        if !self.bytes.has_remaining() {
            record.written.lock().append(&mut deliveries);
        }
    }
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        self.shipment.piece_moves(count);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.shipment.piece_leaves(self.bytes.len());
        self.unload();
        match self.bytes.has_remaining() {
            true => self.shipment.part_lost(),
            false => self.shipment.part_left(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_reads_a_part_of_its_answer_in_time() {
        let mut unread = Unread::new();
        unread.piece_waits(60 << 20);
        assert_eq!(unread.wanted, 4 * ENOUGH_PER_LOOK, "of a large answer");
        let begun = unread.since;
        unread.bytes_move(1);
        assert_eq!(
            (unread.wanted, unread.since),
            (4 * ENOUGH_PER_LOOK - 1, begun),
            "a byte is not enough"
        );
        unread.bytes_move(4 * ENOUGH_PER_LOOK);
        assert_eq!(unread.wanted, 4 * ENOUGH_PER_LOOK);
        assert!(unread.since > begun);
        let mut small = Unread::new();
        small.piece_waits(600);
        assert_eq!(small.wanted, 100, "a sixth of a small one");
        small.bytes_move(598);
        assert_eq!((small.waiting, small.wanted), (2, 1));
    }
}
