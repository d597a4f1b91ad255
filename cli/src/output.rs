//! Standard output, and a progress bar on standard error where that is a terminal.

use std::io::{self, Write};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) struct Output {
    pub(crate) progress: ProgressBar,
    shown: bool,
}

impl Output {
    pub(crate) fn new(steps: u64) -> Self {
        // Indicatif draws nothing where standard error is no terminal.
        let progress = ProgressBar::new(steps);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
            progress.set_style(style);
        }
        Output { progress, shown: true }
    }

    /// Of a rank whose results another one tells, and for tests.
    pub(crate) fn hidden() -> Self {
        Output { progress: ProgressBar::hidden(), shown: false }
    }

    /// Prints above the bar.
    pub(crate) fn print(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        self.progress.suspend(|| {
            if !self.shown {
                return Ok(write(&mut io::sink())?);
            }
            let mut out = io::stdout().lock();
            write(&mut out)?;
            Ok(out.flush()?)
        })
    }
}
