//! Follows the messages of a gRPC body: their announced lengths, and which of them are complete.

use std::collections::VecDeque;

use bytes::Bytes;

/// The length of what precedes each message: a flag, and the length.
const PREFIX: usize = 5;
/// A message up to this length is handed on as it arrives.
const SMALL: usize = 64 << 10;

/// Holds back a large message until all of it has arrived.
///
/// The gRPC library allocates memory for the whole message as soon as it has read the length, and
/// the length may announce bytes that never come.
pub(in crate::ingress) struct Messages {
    /// The longest message that the gRPC library accepts. It refuses a longer one without
    /// allocating memory for it.
    most: usize,
    prefix: [u8; PREFIX],
    /// How many bytes of the next prefix have arrived.
    prefix_bytes: usize,
    /// How many bytes of the message have not arrived.
    missing: usize,
    is_held_back: bool,
    held_back: VecDeque<Bytes>,
    ready: VecDeque<Bytes>,
}

impl Messages {
    pub(in crate::ingress) fn new(most: usize) -> Self {
        Self {
            most,
            prefix: [0; PREFIX],
            prefix_bytes: 0,
            missing: 0,
            is_held_back: false,
            held_back: VecDeque::new(),
            ready: VecDeque::new(),
        }
    }

    /// True between messages.
    pub(in crate::ingress) fn is_whole(&self) -> bool {
        self.missing == 0 && self.prefix_bytes == 0
    }

    /// Takes the next bytes of the body. Returns the first ones that may be handed on;
    /// [`Self::next`] returns the others.
    pub(in crate::ingress) fn take(&mut self, mut bytes: Bytes) -> Option<Bytes> {
        let mut followed = 0;
        let mut ready = 0;
        while followed < bytes.len() {
            followed += self.follow(&bytes[followed..]);
            if !self.is_held_back {
                ready = followed;
            }
        }
        if ready == bytes.len() && self.is_empty() {
            // The usual case: a small message in one piece.
            return Some(bytes);
        }
        if ready > 0 {
            self.ready.append(&mut self.held_back);
            self.ready.push_back(bytes.split_to(ready));
        }
        if !bytes.is_empty() {
            self.held_back.push_back(bytes);
        }
        self.next()
    }

    /// Returns the next bytes to hand on.
    pub(in crate::ingress) fn next(&mut self) -> Option<Bytes> {
        self.ready.pop_front()
    }

    /// Hands on what is left at the end of the body, which is a message that broke off.
    pub(in crate::ingress) fn end(&mut self) {
        self.ready.append(&mut self.held_back);
    }

    pub(in crate::ingress) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.held_back.is_empty()
    }

    /// Follows the bytes up to the end of a prefix or a message. Returns how many that were.
    fn follow(&mut self, bytes: &[u8]) -> usize {
        if self.missing > 0 {
            let length = bytes.len().min(self.missing);
            self.missing -= length;
            self.is_held_back &= self.missing > 0;
            return length;
        }
        let length = bytes.len().min(PREFIX - self.prefix_bytes);
        self.prefix[self.prefix_bytes..self.prefix_bytes + length]
            .copy_from_slice(&bytes[..length]);
        self.prefix_bytes += length;
        // A prefix is held back until it is complete, even that of a small message.
        self.is_held_back = self.prefix_bytes < PREFIX;
        if self.prefix_bytes == PREFIX {
            self.prefix_bytes = 0;
            let [_, announced @ ..] = self.prefix;
            self.missing = u32::from_be_bytes(announced) as usize;
            self.is_held_back = (SMALL + 1..=self.most).contains(&self.missing);
        }
        length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: usize) -> Vec<u8> {
        let mut message = vec![0];
        message.extend(u32::try_from(length).unwrap().to_be_bytes());
        message.resize(PREFIX + length, 7);
        message
    }

    /// Returns the bytes that are handed on after these have arrived.
    fn handed_on(messages: &mut Messages, bytes: &[u8]) -> Vec<u8> {
        let mut next = messages.take(Bytes::copy_from_slice(bytes));
        let mut handed_on = Vec::new();
        while let Some(bytes) = next {
            handed_on.extend_from_slice(&bytes);
            next = messages.next();
        }
        handed_on
    }

    #[test]
    fn a_large_message_is_held_back_until_it_is_whole() {
        let mut messages = Messages::new(1 << 20);
        let large = message(SMALL + 1);
        let (begin, end) = large.split_at(large.len() - 1);
        assert!(handed_on(&mut messages, begin).is_empty());
        assert!(!messages.is_whole() && !messages.is_empty());
        let next = message(3);
        assert_eq!(
            handed_on(&mut messages, &[end, &next[..7]].concat()).len(),
            large.len() + 7
        );
        assert!(!messages.is_whole() && messages.is_empty());
        assert_eq!(handed_on(&mut messages, &next[7..]).len(), 1);
        assert!(messages.is_whole());
    }

    #[test]
    fn bytes_keep_their_order_wherever_they_are_cut() {
        let body = [message(0), message(3), message(SMALL + 9), message(1)].concat();
        for size in [1, 4, 5, 6, 1000, SMALL, body.len()] {
            let mut messages = Messages::new(1 << 20);
            let out: Vec<u8> = body
                .chunks(size)
                .flat_map(|chunk| handed_on(&mut messages, chunk))
                .collect();
            assert!(
                out == body && messages.is_whole() && messages.is_empty(),
                "in chunks of {size}"
            );
        }
    }

    #[test]
    fn a_message_that_is_too_long_or_broke_off_is_handed_on() {
        let mut messages = Messages::new(1 << 20);
        let too_long = message((1 << 20) + 1);
        assert_eq!(
            handed_on(&mut messages, &too_long[..PREFIX]).len(),
            PREFIX,
            "the gRPC library refuses it"
        );
        let mut messages = Messages::new(1 << 20);
        assert!(handed_on(&mut messages, &message(1 << 20)[..1000]).is_empty());
        messages.end();
        assert_eq!(messages.next().map(|bytes| bytes.len()), Some(1000));
    }
}
