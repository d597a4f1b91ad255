//! Standard output, and a progress bar on standard error where that is a terminal.
//!
//! [`Output`] is of runs that print as they go; [`report`] prints what is known all at once.

use std::io::{self, Write};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

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

/// Prints a report to standard output: as JSON if that is asked for, and else as text.
pub(crate) fn report<T: Serialize + ?Sized>(
    json: bool,
    report: &T,
    text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<()> {
    Ok(report_to(&mut io::stdout().lock(), json, report, text)?)
}

/// The error of a reader that has gone stays one of `io`, whichever form it is: it is no failure.
fn report_to<T: Serialize + ?Sized>(
    out: &mut dyn Write,
    json: bool,
    report: &T,
    text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, report)?;
        writeln!(out)?;
    } else {
        text(out)?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_json_or_text() {
        let shown = |json| {
            let mut out = Vec::new();
            report_to(&mut out, json, &serde_json::json!({"a": 1}), |out| writeln!(out, "a is 1")).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!((shown(true).as_str(), shown(false).as_str()), ("{\n  \"a\": 1\n}\n", "a is 1\n"));
    }

    #[test]
    fn a_reader_that_has_gone_is_told_as_such_in_either_form() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        for json in [true, false] {
            let error = report_to(&mut Gone, json, "a", |out| writeln!(out, "a")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        }
    }
}
