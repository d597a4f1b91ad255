//! The CUDA driver: whether it is there, its devices, and its errors.
//!
//! The driver is loaded at run time. cudarc's own loader panics where there is none, so this module looks first, and
//! everything else in the backend starts from a [`Device`], which can't exist without a driver.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    ptr,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use crate::{Error, Result};

/// What a thread that holds it may assume: the driver is loaded and initialised.
pub(crate) struct Driver {
    library: libloading::Library,
}

impl Driver {
    /// The driver of this process, or why there is none.
    pub(crate) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Driver::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Driver> {
        let unavailable = |reason: String| Error::CudaUnavailable { reason };
        let open = |name: &str| {
            // SAFETY: loading the NVIDIA driver library runs its initialisers, which any CUDA program runs as well.
            unsafe { libloading::Library::new(name) }
        };
        let library = open("libcuda.so.1").or_else(|first| open("libcuda.so").map_err(|_| first)).map_err(|error| {
            unavailable(format!("no NVIDIA driver ({error}). Install one, or use the host backend"))
        })?;
        // SAFETY: only looks whether the library can be loaded, under the names that cudarc's loader tries.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable("libcuda.so.1 loads, but not under any name that cudarc tries".into()));
        }
        // SAFETY: the library is present, and cuInit takes only 0.
        check("cuInit", None, unsafe { sys::cuInit(0) }).map_err(|error| unavailable(error.to_string()))?;
        Ok(Driver { library })
    }

    /// An entry point that older drivers lack, if this one has it.
    ///
    /// # Safety
    /// `F` must be the type of that function.
    unsafe fn optional<F: Copy>(&self, name: &CStr) -> Option<F> {
        // SAFETY: the caller vouches for the type; the library is never unloaded, since it lives in a static.
        unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
    }

    /// The CUDA that it supports: 1000 for a major version, 10 for a minor one.
    pub(crate) fn cuda_version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: `version` is a valid place for the answer.
        check("cuDriverGetVersion", None, unsafe { sys::cuDriverGetVersion(&mut version) })?;
        Ok(version)
    }

    /// How many devices this process sees.
    pub(crate) fn device_count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the driver is initialised and `count` is a valid place for its answer.
        check("cuDeviceGetCount", None, unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(count.max(0) as usize)
    }
}

/// Turns a driver's status into a result.
pub(crate) fn check(call: &'static str, device: Option<usize>, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    type Describe = unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult;
    let describe = |function: Describe| {
        let mut text = ptr::null();
        // SAFETY: a status came from the driver, so it is loaded; `text` is a valid place for the answer, which is
        // null or a string in the driver's own static memory.
        unsafe {
            let _ = function(status, &mut text);
            if text.is_null() { "unknown".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    };
    Err(Error::Driver {
        call,
        device,
        code: status as u32,
        name: describe(sys::cuGetErrorName),
        description: describe(sys::cuGetErrorString),
    })
}

/// A device and a hold on its primary context, the one that cudarc, the CUDA runtime and the engines use.
pub(crate) struct Device {
    driver: &'static Driver,
    pub(crate) ordinal: usize,
    pub(crate) handle: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: the handle and the context are names that the driver resolves; the driver is thread-safe.
unsafe impl Send for Device {}
// SAFETY: as above; no method changes the fields.
unsafe impl Sync for Device {}

impl Device {
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Device>> {
        let driver = Driver::get()?;
        let count = driver.device_count()?;
        if ordinal >= count {
            return Err(Error::NoSuchDevice { device: ordinal, count });
        }
        let (mut handle, mut context) = (0, ptr::null_mut());
        // SAFETY: the driver is initialised, the ordinal is one of its devices, the places for the answers are valid.
        unsafe {
            check("cuDeviceGet", Some(ordinal), sys::cuDeviceGet(&mut handle, ordinal as c_int))?;
            check("cuDevicePrimaryCtxRetain", Some(ordinal), sys::cuDevicePrimaryCtxRetain(&mut context, handle))?;
        }
        let device = Arc::new(Device { driver, ordinal, handle, context });
        let major = device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            let (major, minor) = (major as u32, minor as u32);
            return Err(Error::UnsupportedDevice { device: ordinal, name: device.name(), major, minor });
        }
        Ok(device)
    }

    /// The device of this process that has this identity, wherever CUDA_VISIBLE_DEVICES puts it.
    pub(crate) fn of_uuid(uuid: [u8; 16]) -> Result<Option<Arc<Device>>> {
        for ordinal in 0..Driver::get()?.device_count()? {
            let mut handle = 0;
            // SAFETY: the driver is initialised, the ordinal is one of its devices, the place for the answer is valid.
            check("cuDeviceGet", Some(ordinal), unsafe { sys::cuDeviceGet(&mut handle, ordinal as c_int) })?;
            if uuid_of(ordinal, handle)? == uuid {
                return Device::open(ordinal).map(Some);
            }
        }
        Ok(None)
    }

    /// Its identity, the same in every process; of a part of a device (MIG) the part's.
    pub(crate) fn uuid(&self) -> Result<[u8; 16]> {
        uuid_of(self.ordinal, self.handle)
    }

    pub(crate) fn context(&self) -> sys::CUcontext {
        self.context
    }

    pub(crate) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the device exists and `value` is a valid place for the answer.
        let status = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.handle) };
        check("cuDeviceGetAttribute", Some(self.ordinal), status)?;
        Ok(value)
    }

    pub(crate) fn name(&self) -> String {
        let mut name = [0; 256];
        // SAFETY: the driver writes at most 256 bytes, a terminating 0 among them.
        let status = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, self.handle) };
        if status != sys::CUresult::CUDA_SUCCESS {
            return "unknown".into();
        }
        // SAFETY: the driver has written a string that ends within the array.
        unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned()
    }

    /// Whether this device can map memory of `other`.
    pub(crate) fn can_access(&self, other: &Device) -> Result<bool> {
        let mut can = 0;
        // SAFETY: both devices exist and `can` is a valid place for the answer.
        let status = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.handle, other.handle) };
        check("cuDeviceCanAccessPeer", Some(self.ordinal), status)?;
        Ok(can != 0)
    }

    /// Makes the context current on this thread until the guard goes, and then the one that was current before.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the primary context is held for as long as the device lives.
        check("cuCtxPushCurrent", Some(self.ordinal), unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Entered { _device: self })
    }

    /// Makes the context current on a thread of this library's, for the rest of its life.
    pub(crate) fn make_current(&self) {
        // SAFETY: the primary context is held for as long as the device lives. What needs it says what is wrong if it isn't.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
        }
    }

    /// Loads a function's code now: loading it at its first launch would wait for kernels that wait for it.
    pub(crate) fn load_function(&self, function: sys::CUfunction) -> Result<()> {
        type FuncLoad = unsafe extern "C" fn(sys::CUfunction) -> sys::CUresult;
        // SAFETY: this is the type of cuFuncLoad (CUDA 12.4).
        if let Some(load) = unsafe { self.driver.optional::<FuncLoad>(c"cuFuncLoad") } {
            // SAFETY: the function belongs to a module that is loaded.
            check("cuFuncLoad", Some(self.ordinal), unsafe { load(function) })?;
        }
        Ok(())
    }

    /// Waits until everything that was enqueued in the context has finished. False if that can't be known, or not
    /// before `deadline`.
    pub(crate) fn quiesce(&self, deadline: Instant) -> bool {
        let Ok(_entered) = self.enter() else { return false };
        type RecordEvent = unsafe extern "C" fn(sys::CUcontext, sys::CUevent) -> sys::CUresult;
        // SAFETY: this is the type of cuCtxRecordEvent (CUDA 12.5).
        let Some(record) = (unsafe { self.driver.optional::<RecordEvent>(c"cuCtxRecordEvent") }) else {
            // No way to ask for the whole context without blocking. The kernels' waits are bounded, so this is too, but
            // for work of others.
            // SAFETY: the context is current.
            return unsafe { sys::cuCtxSynchronize() } == sys::CUresult::CUDA_SUCCESS;
        };
        let mut event = ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: the context is current and `event` is a valid place for the answer.
        if unsafe { sys::cuEventCreate(&mut event, flags) } != sys::CUresult::CUDA_SUCCESS {
            return false;
        }
        // SAFETY: the event was created in this context.
        let mut status = unsafe { record(self.context, event) };
        if status == sys::CUresult::CUDA_SUCCESS {
            loop {
                // SAFETY: the event exists until it is destroyed below.
                status = unsafe { sys::cuEventQuery(event) };
                if status != sys::CUresult::CUDA_ERROR_NOT_READY || Instant::now() >= deadline {
                    break;
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        // SAFETY: the event exists and nothing else uses it; destroying one that is pending is allowed.
        unsafe {
            let _ = sys::cuEventDestroy_v2(event);
        }
        status == sys::CUresult::CUDA_SUCCESS
    }
}

fn uuid_of(ordinal: usize, handle: sys::CUdevice) -> Result<[u8; 16]> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the device exists and `uuid` is a valid place for the answer.
    check("cuDeviceGetUuid", Some(ordinal), unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, handle) })?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// As the driver's tools write it.
pub(crate) fn uuid_text(uuid: [u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| uuid[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("GPU-{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16))
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: `open` retained it once. A failure means that the process is ending, and nothing is left to do.
        unsafe {
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.handle);
        }
    }
}

/// A context that is current; see [`Device::enter`].
pub(crate) struct Entered<'a> {
    _device: &'a Device,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: `enter` pushed on this thread (the guard is not Send, since it borrows a raw context), and guards
        // nest, so the top of the stack is what it pushed.
        unsafe {
            let _ = sys::cuCtxPopCurrent_v2(&mut popped);
        }
    }
}

/// Makes the context that is current now current again when it goes, whatever was made current meanwhile.
pub(crate) struct Restored {
    context: sys::CUcontext,
}

impl Restored {
    pub(crate) fn new(device: Option<usize>) -> Result<Restored> {
        let mut context = ptr::null_mut();
        // SAFETY: the driver is initialised, as whoever has a stream knows; `context` is a valid place for the answer.
        check("cuCtxGetCurrent", device, unsafe { sys::cuCtxGetCurrent(&mut context) })?;
        Ok(Restored { context })
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        // SAFETY: the context was current on this thread, or null, which means none.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
        }
    }
}

/// The stream handle of a raw call, as cudarc's driver types have it.
pub(crate) fn stream_handle(stream: *mut c_void) -> sys::CUstream {
    stream.cast()
}
