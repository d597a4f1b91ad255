//! Devices, their memory, and the kernels of `kernels/probe.cu`, for what `peersum p2p` and `peersum probe` measure.
//!
//! A rank is a device with a stream and memory of its own; several may be on one device. One thread drives all of them,
//! and everything that is enqueued ends by itself: kernels that wait have a deadline.

use std::{
    ffi::{CString, c_void},
    ptr,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError, result,
    sys::{self, CUdevice_attribute_enum as Attribute},
};

use crate::measure::cuda::failed;

/// How long kernels wait for each other, or for the host.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// The kernels, by their names without the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    Empty,
    Hold,
    Copy,
    Spread,
    Fill,
    Check,
    Chain,
    Chase,
    PingFlag,
    PingPacket,
    Fence,
    Atomic,
}

impl Kernel {
    const ALL: [Kernel; 12] = [
        Kernel::Empty,
        Kernel::Hold,
        Kernel::Copy,
        Kernel::Spread,
        Kernel::Fill,
        Kernel::Check,
        Kernel::Chain,
        Kernel::Chase,
        Kernel::PingFlag,
        Kernel::PingPacket,
        Kernel::Fence,
        Kernel::Atomic,
    ];

    fn name(self) -> &'static str {
        match self {
            Kernel::Empty => "peersum_probe_empty",
            Kernel::Hold => "peersum_probe_hold",
            Kernel::Copy => "peersum_probe_copy",
            Kernel::Spread => "peersum_probe_spread",
            Kernel::Fill => "peersum_probe_fill",
            Kernel::Check => "peersum_probe_check",
            Kernel::Chain => "peersum_probe_chain",
            Kernel::Chase => "peersum_probe_chase",
            Kernel::PingFlag => "peersum_probe_ping_flag",
            Kernel::PingPacket => "peersum_probe_ping_packet",
            Kernel::Fence => "peersum_probe_fence",
            Kernel::Atomic => "peersum_probe_atomic",
        }
    }
}

/// As in `kernels/probe.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Targets {
    to: [u64; Targets::MOST],
    count: u32,
}

impl Targets {
    pub(crate) const MOST: usize = 16;

    pub(crate) fn new(addresses: &[u64]) -> Result<Targets> {
        ensure!((1..=Self::MOST).contains(&addresses.len()), "{} targets, and 1 to 16 are possible", addresses.len());
        let mut to = [0; Self::MOST];
        to[..addresses.len()].copy_from_slice(addresses);
        Ok(Targets { to, count: addresses.len() as u32 })
    }
}

/// What is known of a device.
#[derive(Clone, Debug)]
pub(crate) struct Description {
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    /// As sysfs writes it.
    pub(crate) pci: String,
    pub(crate) multiprocessors: u32,
    /// GB/s of its memory, reads and writes together, by clock and width.
    pub(crate) memory_gb_per_s: Option<f64>,
}

/// A device, in its primary context.
pub(crate) struct Device {
    context: Arc<CudaContext>,
    functions: Vec<sys::CUfunction>,
    pub(crate) description: Description,
}

impl Device {
    fn open(ordinal: usize) -> Result<Device> {
        let context = CudaContext::new(ordinal).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let image = peersum::cuda::probe_image()?;
        context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
        // SAFETY: the image is a whole fatbin that lives for ever, and the context is current. It is never unloaded, so
        // functions are valid as long as the process holds the context.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(failed("cuModuleLoadData"))?;
        let functions = Kernel::ALL.iter().map(|kernel| {
            let name = CString::new(kernel.name()).context("a name has no zero byte")?;
            // SAFETY: the module is loaded.
            unsafe { result::module::get_function(module, name) }
                .map_err(failed("cuModuleGetFunction"))
                .with_context(|| kernel.name().to_owned())
        });
        let functions = functions.collect::<Result<_>>()?;
        Ok(Device { description: describe(&context)?, functions, context })
    }

    fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))
    }

    /// Whether it can reach a peer's memory.
    pub(crate) fn can_reach(&self, peer: &Device) -> Result<bool> {
        let mut can = 0;
        // SAFETY: both are devices, and `can` a place for the answer.
        unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.context.cu_device(), peer.context.cu_device()) }
            .result()
            .map_err(failed("cuDeviceCanAccessPeer"))?;
        Ok(can != 0)
    }

    /// Lets this device reach the peer's memory, or no longer.
    pub(crate) fn reach(&self, peer: &Device, on: bool) -> Result<()> {
        self.bind()?;
        let peer = peer.context.cu_ctx();
        use sys::CUresult::{CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, CUDA_SUCCESS};
        // SAFETY: both contexts are alive. Mappings are taken away only while nothing runs: all that is enqueued here
        // is waited for.
        let (call, status) = unsafe {
            if on {
                ("cuCtxEnablePeerAccess", sys::cuCtxEnablePeerAccess(peer, 0))
            } else {
                ("cuCtxDisablePeerAccess", sys::cuCtxDisablePeerAccess(peer))
            }
        };
        match status {
            CUDA_SUCCESS | CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED | CUDA_ERROR_PEER_ACCESS_NOT_ENABLED => Ok(()),
            status => Err(failed(call)(DriverError(status))),
        }
    }
}

fn describe(context: &CudaContext) -> Result<Description> {
    let attribute = |attribute: Attribute| context.attribute(attribute).map_err(failed("cuDeviceGetAttribute"));
    let [domain, bus, device] = [
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
    ];
    // Drivers that no longer tell say 0.
    let clock_khz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0);
    let width_bits = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
    // Two transfers a clock.
    let memory = f64::from(clock_khz) * 2.0 * f64::from(width_bits) / 8.0 / 1e6;
    Ok(Description {
        ordinal: context.ordinal(),
        name: context.name().map_err(failed("cuDeviceGetName"))?,
        pci: address(domain, bus, device),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1) as u32,
        memory_gb_per_s: (memory > 0.0).then_some(memory),
    })
}

/// A device with a stream.
pub(crate) struct Rank {
    pub(crate) device: Rc<Device>,
    stream: Arc<CudaStream>,
}

/// A rank on each of these devices, of which one may stand several times. The caller has seen that there is a driver.
pub(crate) fn ranks(devices: &[usize]) -> Result<Vec<Rank>> {
    // The events of this build are read by a function that older drivers lack, and cudarc panics over that.
    const OLDEST: i32 = 12080;
    let mut version = 0;
    // SAFETY: the function writes one int to where it is told.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("cuDriverGetVersion"))?;
    ensure!(
        version >= OLDEST,
        "the driver supports CUDA {}.{}, and events are timed by a function of 12.8: update the driver",
        version / 1000,
        version % 1000 / 10
    );
    let mut opened: Vec<Rc<Device>> = Vec::new();
    let mut ranks = Vec::new();
    for &ordinal in devices {
        let device = match opened.iter().find(|device| device.description.ordinal == ordinal) {
            Some(device) => device.clone(),
            None => {
                let device = Rc::new(Device::open(ordinal).with_context(|| format!("device {ordinal}"))?);
                opened.push(device.clone());
                device
            }
        };
        let stream = device.context.new_stream().map_err(failed("cuStreamCreate"))?;
        ranks.push(Rank { device, stream });
    }
    Ok(ranks)
}

/// Where no GPU can be measured, what can be done nevertheless.
pub(crate) const NONE: &str = "no GPU can be measured here (`peersum topo` and `peersum doctor` say what can be seen \
                               without one, and `peersum perf` measures the CPU)";

/// The devices that were asked for, or all.
pub(crate) fn devices(asked: &[usize]) -> Result<Vec<usize>> {
    let count = peersum::cuda::device_count().context(NONE)?;
    ensure!(count > 0, "the driver shows no device (CUDA_VISIBLE_DEVICES can hide them)");
    peersum::cuda::probe_image()?;
    if let Some(missing) = asked.iter().find(|&&device| device >= count) {
        bail!("there is no device {missing}: there are {count}");
    }
    Ok(if asked.is_empty() { (0..count).collect() } else { asked.to_vec() })
}

/// The devices' addresses, as sysfs writes them. No context is made.
pub(crate) fn addresses(devices: &[usize]) -> Result<Vec<String>> {
    result::init().map_err(failed("cuInit"))?;
    let of = |ordinal: usize| -> Result<String> {
        let device = result::device::get(i32::try_from(ordinal)?).map_err(failed("cuDeviceGet"))?;
        let attribute = |attribute: Attribute| {
            // SAFETY: the device is one.
            unsafe { result::device::get_attribute(device, attribute) }.map_err(failed("cuDeviceGetAttribute"))
        };
        Ok(address(
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
        ))
    };
    devices.iter().map(|&device| of(device)).collect()
}

/// Of all devices that CUDA shows, in its order; none without a driver.
pub(crate) fn all_addresses() -> Option<Vec<String>> {
    let count = peersum::cuda::device_count().ok()?;
    addresses(&(0..count).collect::<Vec<_>>()).ok()
}

fn address(domain: i32, bus: i32, device: i32) -> String {
    format!("{domain:04x}:{bus:02x}:{device:02x}.0")
}

/// A parameter of a kernel.
pub(crate) enum Value {
    Word(u32),
    Long(u64),
    Targets(Box<Targets>),
}

impl Rank {
    /// A further stream of the same device.
    pub(crate) fn beside(&self) -> Result<Rank> {
        let stream = self.device.context.new_stream().map_err(failed("cuStreamCreate"))?;
        Ok(Rank { device: self.device.clone(), stream })
    }

    pub(crate) fn same_device(&self, other: &Rank) -> bool {
        Rc::ptr_eq(&self.device, &other.device)
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The values are the kernel's parameters, as `kernels/probe.cu` has them; addresses are valid on this device, for
    /// what the kernel does with them, until the stream was waited for.
    pub(crate) unsafe fn launch(&self, kernel: Kernel, blocks: u32, threads: u32, values: &[Value]) -> Result<()> {
        self.device.bind()?;
        let mut parameters: Vec<*mut c_void> = values
            .iter()
            .map(|value| match value {
                Value::Word(word) => ptr::from_ref(word).cast_mut().cast(),
                Value::Long(long) => ptr::from_ref(long).cast_mut().cast(),
                Value::Targets(targets) => ptr::from_ref(&**targets).cast_mut().cast(),
            })
            .collect();
        let (function, stream) = (self.device.functions[kernel as usize], self.stream.cu_stream());
        // SAFETY: the caller vouches for the parameters, which the driver copies now.
        unsafe {
            let (parameters, extra) = (parameters.as_mut_ptr(), ptr::null_mut());
            sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, extra)
        }
        .result()
        .map_err(failed("cuLaunchKernel"))
    }

    /// Copies between memory of two ranks by a copy engine, on this one's stream.
    ///
    /// # Safety
    /// Both stay until this stream was waited for.
    pub(crate) unsafe fn copy(&self, to: &Memory, from: &Memory, bytes: usize) -> Result<()> {
        let (to_address, from_address) = (to.at(0, bytes)?, from.at(0, bytes)?);
        self.device.bind()?;
        let stream = self.stream.cu_stream();
        // SAFETY: both hold that many bytes, in the contexts named; the caller keeps them.
        unsafe {
            if Rc::ptr_eq(&to.device, &from.device) {
                sys::cuMemcpyDtoDAsync_v2(to_address, from_address, bytes, stream)
            } else {
                let (to, from) = (to.device.context.cu_ctx(), from.device.context.cu_ctx());
                sys::cuMemcpyPeerAsync(to_address, to, from_address, from, bytes, stream)
            }
        }
        .result()
        .map_err(failed("cuMemcpyPeerAsync"))
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(failed("cuStreamSynchronize"))
    }

    pub(crate) fn event(&self) -> Result<CudaEvent> {
        // The default flag, since cudarc's own default turns timing off.
        let event = self.device.context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        event.map_err(failed("cuEventCreate"))
    }

    /// Has this stream record an event.
    pub(crate) fn record(&self, event: &CudaEvent) -> Result<()> {
        event.record(&self.stream).map_err(failed("cuEventRecord"))
    }

    /// Has this stream wait for an event of any device's.
    pub(crate) fn wait(&self, event: &CudaEvent) -> Result<()> {
        self.stream.wait(event).map_err(failed("cuStreamWaitEvent"))
    }

    /// Microseconds from one event of this device's to another.
    pub(crate) fn between(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
        Ok(f64::from(from.elapsed_ms(to).map_err(failed("cuEventElapsedTime"))?) * 1e3)
    }

    /// A graph of so many launches of the empty kernel, replayed; microseconds of a launch.
    pub(crate) fn empty_in_graph(&self, blocks: u32, threads: u32, launches: u32, replays: u32) -> Result<f64> {
        self.device.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(failed("cuStreamBeginCapture"))?;
        // SAFETY: the kernel has no parameters.
        let enqueued = (0..launches).try_for_each(|_| unsafe { self.launch(Kernel::Empty, blocks, threads, &[]) });
        // Ends the capture also after an error, or the stream could not be used again.
        let ended = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        enqueued?;
        let graph = ended.map_err(failed("cuGraphInstantiate"))?.context("the capture gave no graph")?;
        graph.upload().map_err(failed("cuGraphUpload"))?;
        let launch = || graph.launch().map_err(failed("cuGraphLaunch"));
        launch()?;
        let (start, end) = (self.event()?, self.event()?);
        self.record(&start)?;
        (0..replays).try_for_each(|_| launch())?;
        self.record(&end)?;
        self.synchronize()?;
        Ok(self.between(&start, &end)? / f64::from(launches) / f64::from(replays))
    }

    /// Device memory, whose content is whatever it was.
    pub(crate) fn memory(&self, bytes: usize) -> Result<Memory> {
        self.device.bind()?;
        // SAFETY: the context is current, and the memory is freed once, by Drop.
        let address = unsafe { result::malloc_sync(bytes) }
            .map_err(failed("cuMemAlloc"))
            .with_context(|| format!("{bytes} bytes on device {}", self.device.description.ordinal))?;
        Ok(Memory { address, bytes, device: self.device.clone() })
    }

    /// Sets all bytes of memory on this rank's device, and waits for that.
    pub(crate) fn set(&self, memory: &Memory, byte: u8) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the memory has that many bytes, and stays until the stream was waited for, which is now.
        unsafe { result::memset_d8_async(memory.address, byte, memory.bytes, self.stream.cu_stream()) }
            .map_err(failed("cuMemsetD8Async"))?;
        self.synchronize()
    }

    /// The first words of memory on this rank's device, behind all that the stream has to do.
    pub(crate) fn read<const N: usize>(&self, memory: &Memory) -> Result<[u64; N]> {
        let from = memory.at(0, N * size_of::<u64>())?;
        self.device.bind()?;
        let mut words = [0u64; N];
        // SAFETY: the memory has the words, and they outlive the copy, which is waited for.
        unsafe { result::memcpy_dtoh_async(&mut words, from, self.stream.cu_stream()) }
            .map_err(failed("cuMemcpyDtoHAsync"))?;
        self.synchronize()?;
        Ok(words)
    }
}

/// Device memory.
pub(crate) struct Memory {
    pub(crate) address: u64,
    bytes: usize,
    device: Rc<Device>,
}

impl Memory {
    fn at(&self, offset: usize, bytes: usize) -> Result<u64> {
        let end = offset.checked_add(bytes).context("an offset overflows")?;
        ensure!(end <= self.bytes, "bytes {offset} to {end} are not in a buffer of {} bytes", self.bytes);
        Ok(self.address + offset as u64)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // An error here is of the context and would have shown, or shows, at the next call on it.
        if self.device.bind().is_ok() {
            // SAFETY: allocated by `Rank::memory`, freed nowhere else; the driver waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Memory of the host's that all devices reach.
pub(crate) struct Pinned {
    host: *mut c_void,
    device: Rc<Device>,
}

impl Pinned {
    pub(crate) fn new(rank: &Rank, bytes: usize) -> Result<Pinned> {
        rank.device.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current, and the memory is freed once, by Drop.
        let host = unsafe { result::malloc_host(bytes, flags) }.map_err(failed("cuMemHostAlloc"))?;
        // SAFETY: it was just allocated, with that many bytes.
        unsafe { ptr::write_bytes(host.cast::<u8>(), 0, bytes) };
        Ok(Pinned { host, device: rank.device.clone() })
    }

    /// Its address, which is the same on all devices (unified addressing).
    pub(crate) fn address(&self) -> u64 {
        self.host as u64
    }

    /// Sets the first word.
    pub(crate) fn set(&self, value: u32) {
        // SAFETY: the memory has a word, aligned by the driver; devices read it meanwhile, by relaxed loads.
        unsafe { ptr::write_volatile(self.host.cast::<u32>(), value) };
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated by `new`, freed nowhere else, after what uses it was waited for.
            let _ = unsafe { result::free_host(self.host) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_stand_where_they_are_looked_for() {
        for (index, kernel) in Kernel::ALL.into_iter().enumerate() {
            assert_eq!(kernel as usize, index);
            let source = include_str!("../../../kernels/probe.cu");
            assert!(source.contains(&format!("{}(", kernel.name())), "{kernel:?}");
        }
    }

    #[test]
    fn targets_are_laid_out_as_the_kernel_has_them() {
        assert_eq!((size_of::<Targets>(), std::mem::offset_of!(Targets, count)), (136, 128));
        assert!(Targets::new(&[]).is_err() && Targets::new(&[0; 17]).is_err());
    }
}
