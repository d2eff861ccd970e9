//! Draws on the whole terminal, and restores it at the end.

use std::{
    io::{self, Read as _, Write as _},
    os::fd::AsFd as _,
};

use futures::future;
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};
use terminal_size::{Height, Width, terminal_size};
use tokio::{signal::unix::Signal, sync::mpsc};

/// Switches to the alternate screen, and hides the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Switches back to the normal screen, and shows the cursor.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Moves to the top left. The rest of each line, and of the screen, is cleared while drawing.
const HOME: &str = "\x1b[H";
const END_OF_LINE: &str = "\x1b[K";
const END_OF_SCREEN: &str = "\x1b[J";

/// Used if the size of the terminal is unknown.
const USUAL: (u16, u16) = (80, 24);
/// How many key presses may wait to be handled.
const KEYS: usize = 16;

/// The whole terminal. Dropping it restores the previous state.
pub(super) struct Screen {
    saved: Termios,
}

impl Screen {
    pub(super) fn open() -> io::Result<Self> {
        let saved = tcgetattr(io::stdin().as_fd())?;
        let mut raw = saved.clone();
        // Deliver each key at once, without echo. Ctrl-C remains a signal, but Ctrl-Z and Ctrl-\
        // are disabled because they would leave the terminal in this state.
        raw.local_flags
            .remove(LocalFlags::ICANON | LocalFlags::ECHO);
        raw.control_chars[SpecialCharacterIndices::VSUSP as usize] = 0;
        raw.control_chars[SpecialCharacterIndices::VQUIT as usize] = 0;
        tcsetattr(io::stdin().as_fd(), SetArg::TCSADRAIN, &raw)?;
        let screen = Self { saved };
        write(ENTER)?;
        Ok(screen)
    }

    /// Draws the lines, as many as fit.
    pub(super) fn draw(
        &mut self,
        lines: impl FnOnce(usize, usize) -> Vec<String>,
    ) -> io::Result<()> {
        let (width, height) =
            terminal_size().map_or(USUAL, |(Width(width), Height(height))| (width, height));
        let width = usize::from(width.max(1));
        let height = usize::from(height.max(1));
        let mut text = HOME.to_owned();
        for (index, line) in lines(width, height).iter().take(height).enumerate() {
            if index > 0 {
                text += "\r\n";
            }
            text += line;
            text += END_OF_LINE;
        }
        text += END_OF_SCREEN;
        write(&text)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal is gone, nothing needs to be restored.
        write(LEAVE).ok();
        tcsetattr(io::stdin().as_fd(), SetArg::TCSADRAIN, &self.saved).ok();
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Reads keys until the input ends. It uses a thread of its own, because a blocking read in the
/// runtime would delay the exit of the process.
pub(super) fn keys() -> io::Result<mpsc::Receiver<u8>> {
    let (sender, keys) = mpsc::channel(KEYS);
    let read = move || {
        let mut key = [0];
        while let Ok(1..) = io::stdin().lock().read(&mut key) {
            if sender.blocking_send(key[0]).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("keys".to_owned())
        .spawn(read)?;
    Ok(keys)
}

/// Returns after any of the signals. Ignores those that could not be registered.
pub(super) async fn any(signals: &mut [io::Result<Signal>]) {
    let each = signals
        .iter_mut()
        .filter_map(|signal| signal.as_mut().ok())
        .map(|signal| Box::pin(signal.recv()));
    let each: Vec<_> = each.collect();
    if each.is_empty() {
        return future::pending().await;
    }
    future::select_all(each).await;
}
