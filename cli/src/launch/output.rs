//! What ranks print, line by line.

use std::{
    io::{BufRead, BufReader, Read, Write},
    thread::{self, JoinHandle},
};

/// The most bytes of a line that are kept until its end comes. More are passed on as if it had.
const LINE_BYTES: usize = 64 << 10;

/// Passes on all that comes, each line whole with the prefix before it, until the other side is closed.
pub(super) fn pass_on<W: Write>(
    from: impl Read + Send + 'static,
    to: impl Fn() -> W + Send + 'static,
    prefix: String,
) -> JoinHandle<()> {
    thread::spawn(move || {
        // Where nobody reads any more, the rank must still be able to print.
        let mut nobody_reads = false;
        lines(BufReader::new(from), |line| {
            if !nobody_reads {
                nobody_reads = print(&mut to(), prefix.as_bytes(), line).is_err();
            }
        });
    })
}

/// One write, so that lines of ranks don't mix.
fn print(to: &mut impl Write, prefix: &[u8], line: &[u8]) -> std::io::Result<()> {
    to.write_all(&[prefix, line, b"\n"].concat())?;
    to.flush()
}

/// Calls `each` with every line, without its end.
fn lines(mut from: impl BufRead, mut each: impl FnMut(&[u8])) {
    let mut line = Vec::new();
    loop {
        let came = match from.fill_buf() {
            Ok([]) => break,
            Ok(came) => came,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let end = came.iter().position(|&byte| byte == b'\n');
        let taken = end.unwrap_or(came.len()).min(LINE_BYTES - line.len());
        line.extend(&came[..taken]);
        let ends = end == Some(taken);
        from.consume(taken + usize::from(ends));
        if ends || line.len() == LINE_BYTES {
            each(&line);
            line.clear();
        }
    }
    if !line.is_empty() {
        each(&line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &[u8], buffer: usize) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        lines(BufReader::with_capacity(buffer, text), |line| all.push(line.to_vec()));
        all
    }

    #[test]
    fn lines_are_whole_whatever_the_pieces() {
        for buffer in [1, 2, 3, 100] {
            assert_eq!(of(b"one\n\ntwo\r\nlast", buffer), [&b"one"[..], b"", b"two\r", b"last"]);
            assert_eq!(of(b"\xff\n", buffer), [b"\xff"]);
            assert!(of(b"", buffer).is_empty());
        }
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let long = vec![b'x'; LINE_BYTES * 2 + 5];
        let lengths: Vec<_> = of(&long, 1 << 20).iter().map(Vec::len).collect();
        assert_eq!(lengths, [LINE_BYTES, LINE_BYTES, 5]);
        let exact = [&long[..LINE_BYTES], b"\nnext\n"].concat();
        assert_eq!(of(&exact, 1 << 20).last().unwrap(), b"next");
    }

    #[test]
    fn a_line_is_one_write() {
        let mut out = Vec::new();
        print(&mut out, b"[3] ", b"line").unwrap();
        assert_eq!(out, b"[3] line\n");
    }
}
