//! `taskd completions` and `taskd man`: what the command line offers, for shells and for `man`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Command};
use clap_complete::Shell;

/// Print the completions of a shell
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd completions bash > ~/.local/share/bash-completion/completions/taskd
  taskd completions zsh > \"${fpath[1]}/_taskd\"
  taskd completions fish > ~/.config/fish/completions/taskd.fish

They know commands, flags and the values of flags, such as statuses. They do not know the queues of a taskd: for that the \
script would have to call this program at each TAB, which clap offers only as an unstable feature.")]
pub struct Completions {
    /// bash, zsh, fish, elvish or powershell
    #[arg(value_enum, hide_possible_values = true)]
    shell: Shell,
}

/// Write a manual page for each command into a folder
#[derive(Args)]
#[command(after_help = "\
Example:
  taskd man ~/.local/share/man/man1 && man taskd-insert")]
pub struct Man {
    /// Folder of the pages; made if it is missing
    folder: PathBuf,
}

impl Completions {
    pub(super) fn print(&self, mut command: Command) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "taskd", &mut script);
        Ok(super::print::print(
            String::from_utf8_lossy(&script).trim_end(),
        )?)
    }
}

impl Man {
    pub(super) fn write(&self, command: Command) -> anyhow::Result<()> {
        let folder = self.folder.display();
        std::fs::create_dir_all(&self.folder).with_context(|| format!("cannot make {folder}"))?;
        clap_mangen::generate_to(command, &self.folder)
            .with_context(|| format!("cannot write into {folder}"))
    }
}
