//! The filter of queues whose keys are numbers (`dedup = "bitmap"`): one bit per key instead of a
//! hash and an id.
//!
//! A set bit only says that SQL probably has the key. The caller asks SQL which task it is, because
//! the answer to a duplicate names the task, and stores the key if SQL has none. So a bit may be
//! wrong in both directions: a database that is set back needs no new era, and a dead task needs no
//! cleared bit.

use std::collections::BTreeMap;

use super::{Filter, Result};
use crate::{model::QueueName, redis_pool::scripts};

/// A chunk is the bitmap of 2^16 consecutive numbers.
const CHUNK_BITS: u32 = 16;
/// The first number without a bit.
const NUMBERS: u64 = 1 << 40;
/// How many keys of an ordinary filter take as much memory as one chunk.
const KEYS_PER_CHUNK: u64 = 80;
/// The most numbers in one script call, and the most chunks in one command.
const AT_ONCE: usize = 1000;

/// Parses a key as a number: decimal, below 2^40, without leading zeros. Any other key has no bit.
pub fn number(key: &[u8]) -> Option<u64> {
    let is_plain =
        !key.is_empty() && key.iter().all(u8::is_ascii_digit) && (key.len() == 1 || key[0] != b'0');
    let number: u64 = std::str::from_utf8(key)
        .ok()
        .filter(|_| is_plain)?
        .parse()
        .ok()?;
    (number < NUMBERS).then_some(number)
}

/// Returns the chunk of a number, and its bit in the chunk.
fn place(number: u64) -> (u64, u64) {
    (number >> CHUNK_BITS, number & ((1 << CHUNK_BITS) - 1))
}

impl Filter {
    fn chunks_key(&self, queue: &QueueName) -> String {
        format!("{}:{{{queue}}}:bits", self.redis.prefix())
    }

    /// Returns whether the bit of each number is set, in order.
    pub async fn seen_numbers(&self, queue: &QueueName, numbers: &[u64]) -> Result<Vec<bool>> {
        let mut seen = vec![false; numbers.len()];
        let mut chunks: BTreeMap<u64, Vec<(usize, u64)>> = BTreeMap::new();
        for (at, number) in numbers.iter().enumerate() {
            let (chunk, bit) = place(*number);
            chunks.entry(chunk).or_default().push((at, bit));
        }
        if chunks.is_empty() {
            return Ok(seen);
        }
        let index = self.chunks_key(queue);
        let mut pipe = redis::pipe();
        for (chunk, bits) in &chunks {
            let command = pipe.cmd("BITFIELD_RO").arg(format!("{index}:{chunk}"));
            bits.iter().for_each(|(_, bit)| {
                command.arg("GET").arg("u1").arg(bit);
            });
        }
        let answers: Vec<Vec<u8>> = pipe.query_async(&mut self.redis.conn()).await?;
        for (bits, answer) in chunks.values().zip(answers) {
            bits.iter()
                .zip(answer)
                .for_each(|((at, _), bit)| seen[*at] = bit == 1);
        }
        Ok(seen)
    }

    /// Sets the bits of numbers whose tasks are stored. The bitmap takes at most as much memory as
    /// a filter of `limit` keys.
    pub async fn mark_numbers(&self, queue: &QueueName, numbers: &[u64], limit: u64) -> Result<()> {
        let mut numbers = numbers.to_vec();
        numbers.sort_unstable();
        for numbers in numbers.chunks(AT_ONCE) {
            let mut call = scripts::FILTER_BITS
                .call(&[self.chunks_key(queue)])
                .of_items(numbers.len());
            call.arg((limit / KEYS_PER_CHUNK).max(1));
            for number in numbers {
                let (chunk, bit) = place(*number);
                call.arg(chunk).arg(bit);
            }
            self.run(call).await?;
        }
        Ok(())
    }

    /// Forgets all numbers of a queue. Removes the bitmaps before their names, so that the next
    /// call finds the rest if a crash comes in between.
    pub(super) async fn forget_numbers(&self, queue: &QueueName) -> Result<()> {
        let index = self.chunks_key(queue);
        let mut conn = self.redis.conn();
        loop {
            let chunks: Vec<u64> = redis::cmd("SRANDMEMBER")
                .arg(&index)
                .arg(AT_ONCE)
                .query_async(&mut conn)
                .await?;
            if chunks.is_empty() {
                return Ok(());
            }
            let bitmaps: Vec<String> = chunks
                .iter()
                .map(|chunk| format!("{index}:{chunk}"))
                .collect();
            let () = redis::cmd("UNLINK")
                .arg(bitmaps)
                .query_async(&mut conn)
                .await?;
            let () = redis::cmd("SREM")
                .arg(&index)
                .arg(chunks)
                .query_async(&mut conn)
                .await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_decimal_numbers_have_a_bit() {
        for (key, want) in [
            ("0", Some(0)),
            ("7", Some(7)),
            ("65536", Some(65536)),
            ("1099511627775", Some(NUMBERS - 1)),
        ] {
            assert_eq!(number(key.as_bytes()), want);
        }
        for key in [
            "",
            "07",
            "00",
            "+7",
            "-1",
            "7 ",
            "7.0",
            "x",
            "1099511627776",
            "99999999999999999999999999",
            "٣",
        ] {
            assert_eq!(number(key.as_bytes()), None, "{key}");
        }
        assert_eq!((place(65535), place(65536)), ((0, 65535), (1, 0)));
    }
}
