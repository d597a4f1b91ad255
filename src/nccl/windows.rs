//! The memory that a rank has registered.

use std::{
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use super::sys;
use crate::meeting::Wire;

/// A handle of `ncclCommWindowRegister`, which only `ncclCommWindowDeregister` takes back.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowHandle(pub(super) sys::Window);

/// A range of memory that is registered, or was about to be.
struct Window {
    address: u64,
    bytes: usize,
    /// How often it was registered. 0 before NCCL has said that it is.
    uses: usize,
    /// Where NCCL stores the handle, when it is done and not when its call returns: so it may not move or go before.
    place: Box<AtomicPtr<std::ffi::c_void>>,
}

/// What registering a range comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Range {
    /// It is new.
    New,
    /// It is registered already.
    Again,
    /// It can't be, by the caller's mistake.
    Wrong(String),
}

impl Wire for Range {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Range::New => Ok(false),
            Range::Again => Ok(true),
            Range::Wrong(reason) => Err(reason.clone()),
        }
        .put(out);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(match Result::<bool, String>::take(from)? {
            Ok(false) => Range::New,
            Ok(true) => Range::Again,
            Err(reason) => Range::Wrong(reason),
        })
    }
}

/// The windows of a rank.
#[derive(Default)]
pub(super) struct Windows {
    windows: Vec<Window>,
}

impl Windows {
    pub(super) fn classify(&self, address: u64, bytes: usize) -> Range {
        let Some(end) = address.checked_add(bytes as u64).filter(|_| bytes > 0 && address > 0) else {
            return Range::Wrong(format!("{bytes} bytes at {address:#x} are no memory"));
        };
        if !address.is_multiple_of(sys::WINDOW_ALIGNMENT) {
            return Range::Wrong(format!("{address:#x} is not a multiple of {}", sys::WINDOW_ALIGNMENT));
        }
        let overlapping = |window: &&Window| {
            window.uses > 0 && address < window.address + window.bytes as u64 && window.address < end
        };
        match self.windows.iter().find(overlapping) {
            None => Range::New,
            Some(window) if (window.address, window.bytes) == (address, bytes) => Range::Again,
            Some(window) => Range::Wrong(format!(
                "{bytes} bytes at {address:#x} overlap {} bytes at {:#x}, which are registered",
                window.bytes, window.address
            )),
        }
    }

    /// A place for the handle of a new window. It lives as long as the windows do, but for [`Windows::forget_last`].
    pub(super) fn place(&mut self, address: u64, bytes: usize) -> *mut sys::Window {
        let place = Box::new(AtomicPtr::new(ptr::null_mut()));
        let pointer = place.as_ptr();
        self.windows.push(Window { address, bytes, uses: 0, place });
        pointer
    }

    /// The window whose place was given last is registered, unless NCCL has stored no handle.
    pub(super) fn register_last(&mut self) -> bool {
        match self.windows.last_mut() {
            Some(window) if !window.place.load(Ordering::Acquire).is_null() => {
                window.uses = 1;
                true
            }
            _ => false,
        }
    }

    /// NCCL is done with the place that was given last.
    pub(super) fn forget_last(&mut self) {
        self.windows.pop();
    }

    /// Counts one more use of a range that is registered.
    pub(super) fn use_again(&mut self, address: u64, bytes: usize) {
        if let Some(index) = self.position(address, bytes) {
            self.windows[index].uses += 1;
        }
    }

    /// Counts one use less. The handle if it was the last, and an error if there is no such range.
    pub(super) fn release(&mut self, address: u64, bytes: usize) -> Result<Option<WindowHandle>, String> {
        let Some(index) = self.position(address, bytes) else {
            return Err(format!("{bytes} bytes at {address:#x} are not registered"));
        };
        let window = &mut self.windows[index];
        window.uses -= 1;
        if window.uses > 0 {
            return Ok(None);
        }
        let handle = WindowHandle(window.place.load(Ordering::Acquire));
        self.windows.swap_remove(index);
        Ok(Some(handle))
    }

    fn position(&self, address: u64, bytes: usize) -> Option<usize> {
        let is = |window: &Window| window.uses > 0 && (window.address, window.bytes) == (address, bytes);
        self.windows.iter().position(is)
    }

    /// The handles of all that are registered, which are so no longer. The places stay.
    pub(super) fn take_all(&mut self) -> Vec<WindowHandle> {
        let registered = self.windows.iter_mut().filter(|window| window.uses > 0);
        registered
            .map(|window| {
                window.uses = 0;
                WindowHandle(window.place.load(Ordering::Acquire))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn register(windows: &mut Windows, address: u64, bytes: usize) {
        let place = windows.place(address, bytes);
        // SAFETY: the place is there until the window is released.
        unsafe { place.write(address as sys::Window) };
        assert!(windows.register_last());
    }

    #[test]
    fn a_range_ends_with_its_last_use_and_leaves_nothing() {
        let mut windows = Windows::default();
        register(&mut windows, 0x1000, 0x1000);
        register(&mut windows, 0x8000, 0x1000);
        assert_eq!(windows.classify(0x1000, 0x1000), Range::Again);
        windows.use_again(0x1000, 0x1000);
        assert!(windows.release(0x1000, 0x1000).unwrap().is_none());
        let ended = windows.release(0x1000, 0x1000).unwrap().unwrap();
        assert_eq!(ended.0 as u64, 0x1000);
        assert_eq!(windows.classify(0x1000, 0x1000), Range::New);
        assert!(windows.release(0x1000, 0x1000).is_err());
        assert_eq!(windows.windows.len(), 1);
        assert_eq!(windows.take_all()[0].0 as u64, 0x8000);
        assert!(windows.take_all().is_empty());
    }

    #[test]
    fn a_window_that_nccl_has_not_made_is_none() {
        let mut windows = Windows::default();
        windows.place(0x1000, 0x1000);
        assert!(!windows.register_last());
        assert_eq!(windows.classify(0x1000, 0x2000), Range::New);
        assert!(windows.take_all().is_empty());
        windows.forget_last();
        assert!(windows.windows.is_empty());
        assert!(matches!(windows.classify(u64::MAX - 4095, 4096), Range::Wrong(_)));
    }
}
