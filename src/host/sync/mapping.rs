//! A segment's memory as it ships: a shared mapping.

use std::{fs as files, os::fd::OwnedFd, ptr::NonNull, time::Duration};

use rustix::thread::{Timespec, futex};

use super::{AtomicU32, AtomicU64};
use crate::{
    Error, Result,
    host::{
        packets::Packets,
        reduce::{self, Copying, Stores, Target},
    },
    protocol::layout::Layout,
    sealed::Sealed,
};

/// The memory of one segment: zeroed, page-aligned, whole pages.
///
/// Offsets are a [`Layout`]'s, those of the [`Packets`] behind it, and those of the heap behind them. The atomics may
/// be used by any thread at any time; the payload's methods are unsafe, since only the protocol keeps a reader and a
/// writer apart. Threads of other processes that have opened the memory are as those of this one: the meeting lets in
/// none but this library's, of the same version.
#[derive(Debug)]
pub(in crate::host) struct Memory {
    mapping: Sealed,
}

impl Memory {
    /// Memory for a segment of this layout. The pages are reserved here, so that a machine without room for them
    /// answers with an error now and not with SIGBUS in a call.
    pub(in crate::host) fn new(layout: &Layout, symmetric_bytes: usize) -> Result<Memory> {
        Memory::shared(layout, symmetric_bytes).map(|(memory, _)| memory)
    }

    /// Such memory, and the descriptor by which other processes [open](Memory::open) it. Its size can't change any
    /// more.
    pub(in crate::host) fn shared(layout: &Layout, symmetric_bytes: usize) -> Result<(Memory, OwnedFd)> {
        let (mapping, file) = Sealed::create(Packets::new(layout).heap(symmetric_bytes).end)?;
        Ok((Memory { mapping }, file))
    }

    /// The memory of another process, for a segment of this layout. What could shrink under this process, and end it by
    /// SIGBUS, is refused, as is what has another size.
    pub(in crate::host) fn open(layout: &Layout, symmetric_bytes: usize, file: &OwnedFd) -> Result<Memory> {
        Ok(Memory { mapping: Sealed::open(Packets::new(layout).heap(symmetric_bytes).end, file)? })
    }

    /// Whether the machine has room for segments of so many bytes together.
    ///
    /// The system would reserve page after page until it has none left, and then end processes of its choice; so a
    /// group asks first. Nobody can say what others take meanwhile: this catches what could never fit.
    pub(in crate::host) fn check_room(bytes: u64) -> Result<()> {
        let text = files::read_to_string("/proc/meminfo").unwrap_or_default();
        match available_bytes(&text) {
            Some(available) if bytes > available => Err(Error::System {
                call: "reserving memory for the segments",
                reason: format!("{bytes} bytes are wanted and {available} available; lower staging_bytes"),
            }),
            _ => Ok(()),
        }
    }

    /// Bytes of the mapping.
    pub(in crate::host) fn bytes(&self) -> usize {
        self.mapping.bytes()
    }

    /// The word at `offset`, which must be a control word's.
    pub(in crate::host) fn word_32(&self, offset: u64) -> &AtomicU32 {
        let word = self.at(offset, size_of::<AtomicU32>()).cast::<AtomicU32>();
        assert!(word.is_aligned());
        // SAFETY: `at` checked the bounds and the line above the alignment; the memory lives as long as `self`, every
        // bit pattern is a value, and control words are touched through this method alone.
        unsafe { word.as_ref() }
    }

    /// The word at `offset`, which must be a flag's.
    pub(in crate::host) fn word_64(&self, offset: u64) -> &AtomicU64 {
        let word = self.at(offset, size_of::<AtomicU64>()).cast::<AtomicU64>();
        assert!(word.is_aligned());
        // SAFETY: as in `word_32`, for flag words.
        unsafe { word.as_ref() }
    }

    /// Sleeps while the control word at `offset` is `word`, at most for so long. It may also return for no reason.
    pub(in crate::host) fn sleep(&self, offset: u64, word: u32, at_most: Duration) {
        let timeout = Timespec { tv_sec: 0, tv_nsec: at_most.subsec_nanos().into() };
        // Whatever ends it, whoever sleeps looks again. Ranks may be processes, so the word is not private to this one.
        let _ = futex::wait(self.word_32(offset), futex::Flags::empty(), word, Some(&timeout));
    }

    /// Wakes who sleeps on the control word at `offset`.
    pub(in crate::host) fn wake(&self, offset: u64) {
        let _ = futex::wake(self.word_32(offset), futex::Flags::empty(), u32::MAX >> 1);
    }

    /// The `count` words from `offset` on, which must be packets of one slot.
    #[inline]
    pub(in crate::host) fn packets(&self, offset: u64, count: usize) -> &[AtomicU64] {
        let words = self.at(offset, count * size_of::<AtomicU64>()).cast::<AtomicU64>();
        assert!(words.is_aligned());
        // SAFETY: as in `word_32`, for packets.
        unsafe { std::slice::from_raw_parts(words.as_ptr(), count) }
    }

    /// Copies `bytes` bytes into the staging at `offset`.
    ///
    /// # Safety
    ///
    /// `from` is readable for `bytes` bytes and the instructions are available. The range holds no word that is used as
    /// an atomic, and every access to it by another thread happens before this call or after it.
    pub(in crate::host) unsafe fn copy_in(
        &self,
        offset: u64,
        from: *const u8,
        bytes: usize,
        how: Copying,
        stores: Stores,
    ) {
        let to = self.at(offset, bytes).as_ptr();
        // SAFETY: `at` checked the bounds; the caller vouches for `from` and that nobody else is there. A caller's
        // buffer is never in the staging, which no public function gives out, so the ranges are apart.
        unsafe { reduce::copy(how, from, Target { to, stores }, bytes) }
    }

    /// Copies `bytes` bytes out of the staging at `offset`.
    ///
    /// # Safety
    ///
    /// The target is writable for `bytes` bytes and the instructions are available. The range holds no word that is
    /// used as an atomic, and every write to it by another thread happens before this call or after it.
    pub(in crate::host) unsafe fn copy_out(&self, offset: u64, target: Target, bytes: usize, how: Copying) {
        let from = self.at(offset, bytes);
        // SAFETY: as in `copy_in`, the other way round.
        unsafe { reduce::copy(how, from.as_ptr(), target, bytes) }
    }

    /// The staging at `offset`, to read in place until `held` is dropped.
    ///
    /// # Safety
    ///
    /// As for [`Memory::copy_out`], for as long as `held` lives; and the memory outlives it.
    pub(in crate::host) unsafe fn read(&self, offset: u64, bytes: usize, _held: &mut Held) -> *const u8 {
        self.at(offset, bytes).as_ptr()
    }

    /// The staging at `offset`, to write in place until `held` is dropped.
    ///
    /// # Safety
    ///
    /// As for [`Memory::copy_in`], for as long as `held` lives; and the memory outlives it.
    pub(in crate::host) unsafe fn write(&self, offset: u64, bytes: usize, _held: &mut Held) -> *mut u8 {
        self.at(offset, bytes).as_ptr()
    }

    /// The address of a byte, whoever is there.
    pub(in crate::host) fn address(&self, offset: u64) -> *mut u8 {
        self.at(offset, 0).as_ptr()
    }

    #[inline(always)]
    fn at(&self, offset: u64, bytes: usize) -> NonNull<u8> {
        let fits = offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes() as u64);
        assert!(fits, "{bytes} bytes at {offset} are outside the segment of {} bytes", self.bytes());
        // SAFETY: the sum stays within the mapping, as just checked.
        unsafe { self.mapping.base().add(offset as usize) }
    }
}

/// What /proc/meminfo says can be had without swapping.
fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

/// What is being read or written in place. The models keep account of it; here it is nothing.
#[derive(Default)]
pub(in crate::host) struct Held {
    /// What a mapping that lies does when the writing is over.
    #[cfg(test)]
    pub(in crate::host) at_the_end: Vec<Box<dyn FnOnce()>>,
}

#[cfg(test)]
impl Drop for Held {
    fn drop(&mut self) {
        self.at_the_end.drain(..).for_each(|write| write());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_machine_has_is_an_error_before_a_page_is_taken() {
        Memory::check_room(1 << 20).unwrap();
        let error = Memory::check_room(1 << 60).unwrap_err();
        assert!(matches!(error, Error::System { .. }), "{error}");
    }

    #[test]
    fn the_available_memory_is_read() {
        let meminfo =
            "MemTotal:       24539000 kB\nMemFree:          100 kB\nMemAvailable:   12345678 kB\nBuffers: 1 kB\n";
        assert_eq!(available_bytes(meminfo), Some(12_345_678 * 1024));
        assert_eq!(available_bytes("MemTotal: 1 kB\n"), None);
        assert_eq!(available_bytes(""), None);
    }

    #[test]
    fn memory_is_zeroed_whole_pages_and_refuses_what_lies_outside() {
        let layout = Layout::new(2, 1, 4 * 128).unwrap();
        let memory = Memory::new(&layout, 0).unwrap();
        assert_eq!(memory.bytes() % rustix::param::page_size(), 0);
        let mut bytes = vec![1u8; memory.bytes()];
        // SAFETY: the vector has that many bytes, and no other thread is here.
        unsafe {
            let target = Target { to: bytes.as_mut_ptr(), stores: Stores::Cached };
            memory.copy_out(0, target, bytes.len(), crate::host::reduce::Isa::Portable.into());
        }
        assert!(bytes.iter().all(|&byte| byte == 0));
        for offset in [memory.bytes() as u64 - 4, u64::MAX - 3] {
            let outside = std::panic::AssertUnwindSafe(|| memory.word_64(offset));
            assert!(std::panic::catch_unwind(outside).is_err(), "{offset}");
        }
    }

    #[test]
    fn a_segment_is_opened_with_its_own_layout_alone() {
        let layout = Layout::new(2, 1, 4 * 128).unwrap();
        let (memory, file) = Memory::shared(&layout, 0).unwrap();
        let other = Memory::open(&layout, 0, &file).unwrap();
        memory.word_64(0).store(42, super::super::Ordering::Relaxed);
        assert_eq!(other.word_64(0).load(super::super::Ordering::Relaxed), 42);
        let error = Memory::open(&Layout::new(2, 1, 1 << 20).unwrap(), 0, &file).unwrap_err().to_string();
        assert!(error.contains("bytes, not"), "{error}");
    }
}
