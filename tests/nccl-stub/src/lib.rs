//! A stand-in for NCCL: shared libraries that have its functions, compute on host memory, and fail as they are told.
//!
//! A library's state is one for the process, so every [`Stub`] is a copy of its own, which no other test can disturb.

use std::{
    ffi::{CString, c_char, c_int},
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

/// The libraries, by what they pretend to be.
pub mod variants {
    include!(concat!(env!("OUT_DIR"), "/variants.rs"));
}

/// A call that can be made to fail.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Call {
    /// `ncclGetUniqueId`, of rank 0.
    UniqueId,
    /// `ncclCommInitRankConfig`.
    Init,
    /// `ncclAllReduce`.
    AllReduce,
    /// `ncclCommWindowRegister`.
    Register,
}

/// What is counted.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Count {
    /// Communicators made.
    Inits,
    /// Communicators destroyed.
    Destroys,
    /// Communicators aborted.
    Aborts,
    /// All-reduces that were taken.
    AllReduces,
    /// Windows made.
    Registers,
    /// Windows deregistered.
    Deregisters,
    /// Windows that the end of their communicator freed.
    Reclaimed,
    /// Calls that NCCL doesn't allow.
    Misuses,
    /// Unique ids.
    Ids,
}

/// When a fault shows.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum When {
    /// By what the call returns.
    AtOnce,
    /// By the communicator's state afterwards, which then stays.
    Later,
}

/// One library with a state of its own.
pub struct Stub {
    path: PathBuf,
    library: libloading::Library,
}

impl Stub {
    /// A copy of one of [`variants`].
    ///
    /// # Panics
    ///
    /// If it can't be copied or loaded.
    pub fn new(variant: &str) -> Stub {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("peersum-nccl-stub-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).expect("the folder for temporary files can be written");
        let path = folder.join("libnccl.so.2");
        fs::copy(variant, &path).expect("the stub was built");
        // SAFETY: the stub has no initialisers.
        let library = unsafe { libloading::Library::new(&path) }.expect("the stub loads");
        Stub { path, library }
    }

    /// Its file, named as NCCL's is. Its folder has nothing else.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the callers give the types that stub.c has.
        *unsafe { self.library.get::<F>(name.as_bytes()) }.expect("stub.c has it")
    }

    /// Lets the next `times` calls of `rank` fail with `code`, and `text` as the last error.
    pub fn fail(&self, call: Call, rank: usize, code: i32, times: i32, when: When, text: &str) {
        let fail: unsafe extern "C" fn(c_int, c_int, c_int, c_int, c_int, *const c_char) = self.function("stub_fail");
        let text = CString::new(text).expect("no zeros");
        // SAFETY: the text is a string that lives through the call; the stub copies it.
        unsafe { fail(call as c_int, rank as c_int, code, times, when as c_int, text.as_ptr()) }
    }

    fn tell(&self, name: &str, value: i32) {
        let tell: unsafe extern "C" fn(c_int) = self.function(name);
        // SAFETY: the function stores a number.
        unsafe { tell(value) }
    }

    /// Lets the init of `rank` not end until it is told otherwise.
    pub fn hang_init(&self, rank: usize, hang: bool) {
        let set: unsafe extern "C" fn(c_int, c_int) = self.function("stub_hang_init");
        // SAFETY: the function stores a number; the ranks of tests are few.
        unsafe { set(rank as c_int, hang.into()) }
    }

    /// Lets the init call of `rank` not return until it is told otherwise.
    pub fn block_init(&self, rank: usize, block: bool) {
        let set: unsafe extern "C" fn(c_int, c_int) = self.function("stub_block_init");
        // SAFETY: the function stores a number; the ranks of tests are few.
        unsafe { set(rank as c_int, block.into()) }
    }

    /// Whether windows can be registered only after a collective.
    pub fn lazy_windows(&self, lazy: bool) {
        self.tell("stub_lazy_windows", lazy.into());
    }

    /// How often a call is "in progress" before it is done: 2 unless set. Of the calls from now on.
    pub fn polls(&self, polls: i32) {
        self.tell("stub_polls", polls);
    }

    /// Lets destroying and aborting wait until it is told otherwise.
    pub fn block_end(&self, block: bool) {
        self.tell("stub_block_end", block.into());
    }

    /// Lets the communicators of `rank` have found an error.
    pub fn async_error(&self, rank: usize, code: i32, text: &str) {
        let set: unsafe extern "C" fn(c_int, c_int, *const c_char) = self.function("stub_async_error");
        let text = CString::new(text).expect("no zeros");
        // SAFETY: the text is a string that lives through the call; the stub copies it.
        unsafe { set(rank as c_int, code, text.as_ptr()) }
    }

    /// The `maxCTAs` of the last init.
    pub fn max_ctas(&self) -> i32 {
        let get: unsafe extern "C" fn() -> c_int = self.function("stub_max_ctas");
        // SAFETY: the function reads a number.
        unsafe { get() }
    }

    /// How often something happened.
    pub fn count(&self, what: Count) -> i64 {
        let count: unsafe extern "C" fn(c_int) -> i64 = self.function("stub_count");
        // SAFETY: the function reads a number, of which there are as many as `Count` has values.
        unsafe { count(what as c_int) }
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        // What is loaded stays so. That the folder may be gone is no reason to fail.
        if let Some(folder) = self.path.parent() {
            let _ = fs::remove_dir_all(folder);
        }
    }
}
