//! The output of a command, within bounds.

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Why an output is of no use.
#[derive(Debug)]
pub(super) enum Excess {
    TooMuch,
    Unreadable(std::io::Error),
}

/// All of the output, if it has at most `most` bytes.
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

/// The last `most` bytes of the output, however long it is.
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

/// Writes `input`. A command need not read it.
pub(super) async fn feed(mut stdin: impl AsyncWrite + Unpin, input: &[u8]) {
    // The command has closed its stdin, or has ended: its exit code says whether that is a mistake.
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
