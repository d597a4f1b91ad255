//! What of NCCL's binary interface is used, written by hand: types, numbers, and the table of entry points.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::meeting::Wire;

use super::Version;

pub(super) type Comm = *mut c_void;
pub(super) type Window = *mut c_void;
pub(super) type Stream = *mut c_void;
/// An enum in C; any number may come from a version that has more.
pub(super) type Status = c_int;

pub(super) const SUCCESS: Status = 0;
pub(super) const UNHANDLED_CUDA_ERROR: Status = 1;
pub(super) const SYSTEM_ERROR: Status = 2;
pub(super) const INTERNAL_ERROR: Status = 3;
pub(super) const IN_PROGRESS: Status = 7;

/// The window's offsets are the same on all ranks.
pub(super) const WINDOW_SYMMETRIC: c_int = 1;
/// What a window's address must be a multiple of.
pub(super) const WINDOW_ALIGNMENT: u64 = 4096;

const UNDEFINED: c_int = c_int::MIN;

/// Who meets whom. Goes by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId {
    pub(super) bytes: [c_char; 128],
}

impl Wire for UniqueId {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self.bytes.map(|byte| byte as u8));
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(UniqueId { bytes: <[u8; 128]>::take(from)?.map(|byte| byte as c_char) })
    }
}

/// The configuration as 2.18 has it. It begins with its size and version, by which every later version reads it, with
/// the defaults for what it lacks.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

const _: () = assert!(size_of::<Config>() == 48);

impl Config {
    /// Blocking, with at most `max_ctas` blocks a kernel. Non-blocking communicators start a thread for each call in recent
    /// versions: an eager call of 2.32 takes 100 µs of the host's time instead of 10.
    pub(super) fn new(max_ctas: Option<u32>) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 2_18_00,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: max_ctas.map_or(UNDEFINED, |most| c_int::try_from(most).unwrap_or(c_int::MAX)),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

pub(super) type GetVersion = unsafe extern "C" fn(*mut c_int) -> Status;
pub(super) type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> Status;
pub(super) type CommInitRankConfig = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
pub(super) type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Status;
pub(super) type End = unsafe extern "C" fn(Comm) -> Status;
pub(super) type CommGetAsyncError = unsafe extern "C" fn(Comm, *mut Status) -> Status;
pub(super) type GetErrorString = unsafe extern "C" fn(Status) -> *const c_char;
pub(super) type GetLastError = unsafe extern "C" fn(Comm) -> *const c_char;
pub(super) type CommNumber = unsafe extern "C" fn(Comm, *mut c_int) -> Status;
pub(super) type WindowRegister = unsafe extern "C" fn(Comm, *mut c_void, usize, *mut Window, c_int) -> Status;
pub(super) type WindowDeregister = unsafe extern "C" fn(Comm, Window) -> Status;

/// The entry points.
///
/// `ncclCommFinalize` is not among them: `ncclCommDestroy` does without what it does, and calling it for one rank alone
/// would wait for the others. `ncclCommRegister` neither: what it is for, windows do better, and two kinds of handles
/// in one list is how they come to be freed by the wrong call.
pub(super) struct Functions {
    pub(super) get_unique_id: GetUniqueId,
    pub(super) comm_init_rank_config: CommInitRankConfig,
    pub(super) all_reduce: AllReduce,
    pub(super) comm_destroy: End,
    pub(super) comm_abort: End,
    pub(super) comm_get_async_error: CommGetAsyncError,
    pub(super) get_error_string: GetErrorString,
    pub(super) get_last_error: Option<GetLastError>,
    pub(super) comm_count: Option<CommNumber>,
    pub(super) comm_user_rank: Option<CommNumber>,
    /// From 2.27 on.
    pub(super) windows: Option<(WindowRegister, WindowDeregister)>,
}

impl Functions {
    /// The version of a library and its entry points, or which one it lacks.
    ///
    /// # Safety
    /// If the library has functions of these names, they must be NCCL's, and it must not be unloaded afterwards.
    pub(super) unsafe fn of(library: &libloading::Library) -> Result<(Version, Functions), String> {
        // SAFETY: this is the type of that function in all versions.
        let get_version: GetVersion = unsafe { required(library, c"ncclGetVersion") }?;
        let mut code = 0;
        // SAFETY: `code` is a valid place for the answer.
        let status = unsafe { get_version(&mut code) };
        if status != SUCCESS {
            return Err(format!("ncclGetVersion gave {status}"));
        }
        let version = Version::from_code(code.max(0) as u32);
        if version.major != 2 || version < super::OLDEST {
            return Err(format!("it is NCCL {version}, and versions from {} to 2.x serve", super::OLDEST));
        }
        // SAFETY: these are the types that the functions have since 2.18, and since they exist.
        let functions = unsafe {
            Functions {
                get_unique_id: required(library, c"ncclGetUniqueId")?,
                comm_init_rank_config: required(library, c"ncclCommInitRankConfig")?,
                all_reduce: required(library, c"ncclAllReduce")?,
                comm_destroy: required(library, c"ncclCommDestroy")?,
                comm_abort: required(library, c"ncclCommAbort")?,
                comm_get_async_error: required(library, c"ncclCommGetAsyncError")?,
                get_error_string: required(library, c"ncclGetErrorString")?,
                get_last_error: optional(library, c"ncclGetLastError"),
                comm_count: optional(library, c"ncclCommCount"),
                comm_user_rank: optional(library, c"ncclCommUserRank"),
                windows: optional(library, c"ncclCommWindowRegister")
                    .zip(optional(library, c"ncclCommWindowDeregister")),
            }
        };
        Ok((version, functions))
    }
}

/// # Safety
/// `F` must be the type of that function, and the library must not be unloaded.
unsafe fn optional<F: Copy>(library: &libloading::Library, name: &CStr) -> Option<F> {
    // SAFETY: the caller vouches for both.
    unsafe { library.get::<F>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
}

/// # Safety
/// As [`optional`].
unsafe fn required<F: Copy>(library: &libloading::Library, name: &CStr) -> Result<F, String> {
    // SAFETY: the caller vouches for both.
    unsafe { optional(library, name) }.ok_or_else(|| format!("it has no {}", name.to_string_lossy()))
}

/// NCCL's name for a status.
pub(super) fn name(status: Status) -> String {
    const NAMES: [&str; 9] = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ];
    let name = usize::try_from(status).ok().and_then(|index| NAMES.get(index));
    name.map_or_else(|| format!("status {status}"), |&name| name.to_owned())
}
