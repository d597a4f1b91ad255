//! Memory that processes share by descriptor, and whose size no process can change under another.

use std::{
    os::fd::{AsFd, OwnedFd},
    ptr::{self, NonNull},
};

use rustix::{
    fs::{self, FallocateFlags, MemfdFlags, SealFlags},
    mm::{self, Advice, MapFlags, ProtFlags},
    param,
};

use crate::{Error, Result};

/// A shared mapping of whole pages, zeroed at first. It has no name, and the system frees it with the last process that
/// has it or its descriptor.
#[derive(Debug)]
pub(crate) struct Sealed {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread; what is done with the address is unsafe.
unsafe impl Send for Sealed {}
// SAFETY: as for Send.
unsafe impl Sync for Sealed {}

/// Less than this gains nothing by huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What the file may never do again.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

impl Sealed {
    /// Such memory of at least so many bytes, and the descriptor by which other processes [open](Sealed::open) it. The
    /// pages are reserved here, so that a machine without room for them answers with an error now and not with SIGBUS
    /// later.
    pub(crate) fn create(bytes: u64) -> Result<(Sealed, OwnedFd)> {
        let bytes = pages(bytes)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = fs::memfd_create("peersum", flags).map_err(failed("memfd_create for a segment"))?;
        fs::ftruncate(&file, bytes as u64).map_err(failed("ftruncate of a segment"))?;
        fs::fcntl_add_seals(&file, SEALS).map_err(failed("sealing a segment"))?;
        let memory = Sealed::map(&file, bytes, MapFlags::empty())?;
        memory.take_huge_pages();
        // EINTR is the one failure that a second try cures.
        loop {
            match fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64) {
                Err(rustix::io::Errno::INTR) => {}
                result => break result.map_err(failed("fallocate of a segment"))?,
            }
        }
        // With all pages there, this maps them, so that no call has to.
        // SAFETY: the range is the mapping, and nothing of it changes.
        let _ = unsafe { mm::madvise(memory.base.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) };
        Ok((memory, file))
    }

    /// Takes huge pages for it where the system has them for shared memory that asks (`shmem_enabled` is `advise`), and
    /// none if it hasn't. The thread that calls this is the first to touch them, so they are near to it.
    ///
    /// Those of hugetlbfs are not taken: they are few, and were set aside for somebody.
    fn take_huge_pages(&self) {
        if self.bytes < HUGE_PAGE_BYTES {
            return;
        }
        let base = self.base.as_ptr().cast();
        // SAFETY: the range is the mapping, whose content stays as it is.
        let asked = unsafe { mm::madvise(base, self.bytes, Advice::LinuxHugepage) };
        if asked.is_ok() {
            // Only a touch through the mapping makes them. What fails here, fails in the reserving that follows.
            // SAFETY: as above.
            let _ = unsafe { mm::madvise(base, self.bytes, Advice::LinuxPopulateWrite) };
        }
    }

    /// The memory of another process, of the pages that so many bytes need. What could shrink under this process, and
    /// end it by SIGBUS, is refused, as is what has another size.
    pub(crate) fn open(bytes: u64, file: &OwnedFd) -> Result<Sealed> {
        let bytes = pages(bytes)?;
        let refused = |reason: String| Error::System { call: "opening a peer's segment", reason };
        let seals = fs::fcntl_get_seals(file).map_err(|errno| refused(format!("it has no seals: {errno}")))?;
        if !seals.contains(SEALS) {
            return Err(refused("its size is not sealed".into()));
        }
        let size = fs::fstat(file).map_err(failed("fstat of a peer's segment"))?.st_size;
        if u64::try_from(size) != Ok(bytes as u64) {
            return Err(refused(format!("it has {size} bytes, not {bytes}")));
        }
        Sealed::map(file, bytes, MapFlags::POPULATE)
    }

    fn map(file: &OwnedFd, bytes: usize, flags: MapFlags) -> Result<Sealed> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of this program.
        let base = unsafe {
            mm::mmap(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | flags,
                file.as_fd(),
                0,
            )
        }
        .map_err(failed("mmap of a segment"))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| Error::System {
            call: "mmap of a segment",
            reason: "the kernel mapped it at address 0".into(),
        })?;
        Ok(Sealed { base, bytes })
    }

    /// Bytes of the mapping: whole pages.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps the pages mapped for ever: something may still use them.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn leak(&mut self) {
        self.bytes = 0;
    }

    /// Where it starts.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Sealed {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        // SAFETY: the mapping is this value's own, of just this size, and whoever could use it held a reference to this
        // value. An error would mean that it is not mapped; nothing better than leaving it can be done then.
        let _ = unsafe { mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// So many bytes, in whole pages.
fn pages(wanted: u64) -> Result<usize> {
    let bytes = usize::try_from(wanted).ok().and_then(|bytes| bytes.checked_next_multiple_of(param::page_size()));
    bytes.ok_or_else(|| Error::System {
        call: "sizing a segment",
        reason: format!("{wanted} bytes are more than memory can be addressed by"),
    })
}

fn failed(call: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |errno| Error::System { call, reason: errno.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_opened_as_it_was_made_or_not_at_all() {
        let (memory, file) = Sealed::create(5000).unwrap();
        assert_eq!(memory.bytes() % param::page_size(), 0);
        let other = Sealed::open(5000, &file).unwrap();
        // SAFETY: both are mappings of at least so many bytes, and no other thread is here.
        unsafe {
            memory.base().add(4999).write_volatile(42);
            assert_eq!(other.base().add(4999).read_volatile(), 42);
        }
        assert!(fs::ftruncate(&file, 0).is_err(), "sealed");

        let refused = |file: &OwnedFd, words: &str| {
            let error = Sealed::open(5000, file).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(&Sealed::create(1 << 20).unwrap().1, "bytes, not");
        let open = fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fs::ftruncate(&open, memory.bytes() as u64).unwrap();
        refused(&open, "not sealed");
        fs::fcntl_add_seals(&open, SealFlags::GROW | SealFlags::SEAL).unwrap();
        refused(&open, "not sealed");
        refused(&std::fs::File::open("/dev/null").unwrap().into(), "no seals");
    }
}
