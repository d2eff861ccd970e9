//! Captures the output of a command, up to a limit.

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Why an output cannot be used.
#[derive(Debug)]
pub(super) enum Excess {
    TooMuch,
    Unreadable(std::io::Error),
}

/// Reads all of the output; fails if it is longer than `most` bytes.
pub(super) async fn all(output: impl AsyncRead + Unpin, most: u64) -> Result<Vec<u8>, Excess> {
    let mut bytes = Vec::new();
    output
        .take(most.saturating_add(1))
        .read_to_end(&mut bytes)
        .await
        .map_err(Excess::Unreadable)?;
    if bytes.len() as u64 > most {
        Err(Excess::TooMuch)
    } else {
        Ok(bytes)
    }
}

/// Reads all of the output, and returns its last `most` bytes.
pub(super) async fn tail(
    mut output: impl AsyncRead + Unpin,
    most: usize,
) -> std::io::Result<Vec<u8>> {
    let mut tail = Vec::new();
    let mut part = [0; 8192];
    loop {
        let read = output.read(&mut part).await?;
        if read == 0 {
            return Ok(tail);
        }
        tail.extend_from_slice(&part[..read]);
        tail.drain(..tail.len().saturating_sub(most));
    }
}

/// Writes `input` to the command, which does not have to read it.
pub(super) async fn feed(mut stdin: impl AsyncWrite + Unpin, input: &[u8]) {
    // An error means that the command closed stdin or ended. Its exit code says whether it failed.
    stdin.write_all(input).await.ok();
    stdin.shutdown().await.ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_output_is_read_within_bounds() {
        assert_eq!(all(&b"abc"[..], 3).await.unwrap(), b"abc");
        assert!(matches!(all(&b"abcd"[..], 3).await, Err(Excess::TooMuch)));
        let long = [vec![b'x'; 100_000], b"the end".to_vec()].concat();
        assert_eq!(tail(&long[..], 7).await.unwrap(), b"the end");
        assert_eq!(tail(&b"short"[..], 7).await.unwrap(), b"short");
    }
}
