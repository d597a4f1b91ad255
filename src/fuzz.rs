//! A door to the parsers of bytes from outside, for `fuzz/` alone.

/// Gives the bytes to every parser. None may panic, or take much memory.
pub fn parse(bytes: &[u8]) {
    crate::meeting::fuzz(bytes);
    crate::host::fuzz(bytes);
}
