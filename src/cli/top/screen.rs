//! The terminal as a whole screen, and as it was before when that ends.

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

/// Goes to the second screen of the terminal, and hides the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Goes back to what was there before.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// To the top left; the rest of a line, and of the screen, is cleared when it is written.
const HOME: &str = "\x1b[H";
const END_OF_LINE: &str = "\x1b[K";
const END_OF_SCREEN: &str = "\x1b[J";

/// The size of a terminal that does not tell its own.
const USUAL: (u16, u16) = (80, 24);
/// Of keys that nobody took yet.
const KEYS: usize = 16;

/// The whole terminal, until it is dropped.
pub(super) struct Screen {
    saved: Termios,
}

impl Screen {
    pub(super) fn open() -> io::Result<Self> {
        let saved = tcgetattr(io::stdin().as_fd())?;
        let mut raw = saved.clone();
        // Keys come at once and are not shown. Ctrl-C still is a signal; Ctrl-Z and Ctrl-\ would
        // leave the terminal as it is.
        raw.local_flags
            .remove(LocalFlags::ICANON | LocalFlags::ECHO);
        raw.control_chars[SpecialCharacterIndices::VSUSP as usize] = 0;
        raw.control_chars[SpecialCharacterIndices::VQUIT as usize] = 0;
        tcsetattr(io::stdin().as_fd(), SetArg::TCSADRAIN, &raw)?;
        let screen = Self { saved };
        write(ENTER)?;
        Ok(screen)
    }

    /// Draws the lines that fit.
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
        // A terminal that is gone needs neither.
        write(LEAVE).ok();
        tcsetattr(io::stdin().as_fd(), SetArg::TCSADRAIN, &self.saved).ok();
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// The keys, until the input ends. A thread reads them: one of the runtime would hold up the end of
/// the process.
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

/// Ends with the first of the signals. One that cannot be had does not come.
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
