//! Which GPU each of CUDA's devices is.
//!
//! NVML's index, the minor number and CUDA's ordinal are three numberings. CUDA's follows CUDA_DEVICE_ORDER, and
//! CUDA_VISIBLE_DEVICES picks from it and puts it in another order. Best is to ask the driver and to match by address;
//! where it can't be asked, the variables are read as CUDA reads them, and what they don't decide is unknown.

use serde::Serialize;

use super::machine::Machine;

/// CUDA's devices, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Visible {
    pub(crate) devices: Vec<Device>,
    /// How this is known.
    pub(crate) from: &'static str,
    /// What else is to be said, such as where the list ended early.
    pub(crate) note: Option<String>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    /// The place in [`Machine::gpus`]; unknown of an instance of MIG whose name doesn't tell.
    pub(crate) gpu: Option<usize>,
    pub(crate) uuid: Option<String>,
    /// A part of a GPU: no P2P, no IPC.
    pub(crate) mig: bool,
}

impl Visible {
    /// By the addresses that the driver has, in its order.
    #[allow(dead_code)] // without CUDA there is no driver to ask
    pub(crate) fn of_driver(machine: &Machine, addresses: &[String]) -> Visible {
        let device = |address: &String| {
            let address = address.parse().ok();
            let gpu = machine.gpus.iter().position(|gpu| gpu.address.is_some() && gpu.address == address);
            device(machine, gpu, gpu.is_some_and(|gpu| machine.gpus[gpu].mig == Some(true)))
        };
        Visible { devices: addresses.iter().map(device).collect(), from: "the driver", note: None }
    }

    /// By CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; an error says why these don't decide it.
    pub(crate) fn of_variables(machine: &Machine, list: Option<&str>, order: Option<&str>) -> Result<Visible, String> {
        let from = "CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER";
        let Some(list) = list else {
            let devices = ordered(machine, order)?.into_iter().map(|gpu| device(machine, Some(gpu), false));
            return Ok(Visible { devices: devices.collect(), from, note: None });
        };
        let mut visible = Visible { from, ..Visible::default() };
        for (place, entry) in list.split(',').map(str::trim).enumerate() {
            let Some(found) = one(machine, entry, order)? else {
                visible.note =
                    Some(format!("the list ends at its entry {}, '{entry}', which names no device", place + 1));
                break;
            };
            if found.gpu.is_some() && !found.mig && visible.devices.contains(&found) {
                let note = format!("'{entry}' names a device for the second time, and CUDA then shows none");
                return Ok(Visible { devices: Vec::new(), from, note: Some(note) });
            }
            visible.devices.push(found);
        }
        if visible.devices.iter().any(|device| device.mig) {
            let note = "an instance of MIG has no P2P and no IPC, and a process sees one of them at most";
            visible.note.get_or_insert_with(|| note.into());
        }
        Ok(visible)
    }

    /// Whether CUDA's devices are the machine's GPUs, in their order.
    pub(crate) fn is_plain(&self, machine: &Machine) -> bool {
        let places: Vec<_> = self.devices.iter().map(|device| device.gpu).collect();
        places == (0..machine.gpus.len()).map(Some).collect::<Vec<_>>() && self.devices.iter().all(|device| !device.mig)
    }
}

fn device(machine: &Machine, gpu: Option<usize>, mig: bool) -> Device {
    Device { gpu, uuid: gpu.and_then(|gpu| machine.gpus[gpu].uuid.clone()), mig }
}

/// An entry of the list; none if it names nothing.
fn one(machine: &Machine, entry: &str, order: Option<&str>) -> Result<Option<Device>, String> {
    if let Some(of) = entry.strip_prefix("MIG-") {
        // The older form has the GPU's own name in it, the newer one says nothing of it.
        let parent = of.starts_with("GPU-").then(|| of.split('/').next().unwrap_or(of));
        return Ok(Some(device(machine, parent.and_then(|parent| by_uuid(machine, parent)), true)));
    }
    if entry.starts_with("GPU-") {
        if machine.gpus.iter().any(|gpu| gpu.uuid.is_none()) {
            return Err("CUDA_VISIBLE_DEVICES has UUIDs, and those of the GPUs are unknown".into());
        }
        return Ok(by_uuid(machine, entry).map(|gpu| device(machine, Some(gpu), false)));
    }
    let Ok(index) = entry.parse::<usize>() else { return Ok(None) };
    Ok(ordered(machine, order)?.get(index).map(|&gpu| device(machine, Some(gpu), false)))
}

/// The only GPU whose UUID begins so.
fn by_uuid(machine: &Machine, start: &str) -> Option<usize> {
    let is = |gpu: &usize| machine.gpus[*gpu].uuid.as_deref().is_some_and(|uuid| uuid.starts_with(start));
    let mut found = (0..machine.gpus.len()).filter(is);
    found.next().filter(|_| found.next().is_none())
}

/// GPUs in CUDA's order.
fn ordered(machine: &Machine, order: Option<&str>) -> Result<Vec<usize>, String> {
    let mut gpus: Vec<_> = (0..machine.gpus.len()).collect();
    if gpus.iter().any(|&gpu| machine.gpus[gpu].address.is_none()) && gpus.len() > 1 {
        return Err("the addresses of the GPUs are unknown, so CUDA's order is too".into());
    }
    let kind = |gpu: usize| (&machine.gpus[gpu].name, machine.gpus[gpu].compute_capability);
    let alike = gpus.windows(2).all(|pair| kind(pair[0]) == kind(pair[1]));
    if order != Some("PCI_BUS_ID") && !alike {
        return Err(
            "CUDA puts the fastest of these different GPUs first, and only the driver knows which it takes for that; with \
             CUDA_DEVICE_ORDER=PCI_BUS_ID the order is that of the addresses"
                .into(),
        );
    }
    gpus.sort_by_key(|&gpu| machine.gpus[gpu].address);
    Ok(gpus)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::topology::machine::Gpu;

    /// Four slow GPUs, then four fast ones; NVML has them by address.
    fn mixed() -> Machine {
        let gpu = |index: usize| Gpu {
            address: format!("0000:{:02x}:00.0", 0x10 + index).parse().ok(),
            name: Some(if index < 4 { "slow" } else { "fast" }.into()),
            uuid: Some(format!("GPU-{index}{index}7b61d8-0000")),
            compute_capability: Some(if index < 4 { (8, 6) } else { (9, 0) }),
            ..Gpu::default()
        };
        Machine { gpus: (0..8).map(gpu).collect(), ..Machine::default() }
    }

    fn alike() -> Machine {
        let mut machine = mixed();
        machine.gpus.iter_mut().for_each(|gpu| (gpu.name, gpu.compute_capability) = (Some("one".into()), Some((9, 0))));
        machine
    }

    fn places(visible: &Visible) -> Vec<usize> {
        visible.devices.iter().map(|device| device.gpu.unwrap()).collect()
    }

    /// Field case A52 (vllm-project/vllm#4233).
    #[test]
    fn each_logical_device_is_the_right_gpu() {
        let machine = mixed();
        let by_bus = |list| places(&Visible::of_variables(&machine, Some(list), Some("PCI_BUS_ID")).unwrap());
        assert_eq!(by_bus("4,5,6,7"), [4, 5, 6, 7]);
        assert_eq!((by_bus("3,1"), by_bus("1,0")), (vec![3, 1], vec![1, 0]));
        // The fastest are first, and the driver says which they are.
        let addresses: Vec<_> =
            [4, 5, 6, 7, 0, 1, 2, 3].map(|gpu: usize| machine.gpus[gpu].address.unwrap().to_string()).into();
        let driver = Visible::of_driver(&machine, &addresses);
        assert_eq!(places(&driver), [4, 5, 6, 7, 0, 1, 2, 3]);
        assert_eq!(driver.devices[0].uuid.as_deref(), Some("GPU-447b61d8-0000"));
        // By the variables alone that can't be known, and isn't guessed.
        for order in [None, Some("FASTEST_FIRST")] {
            assert!(Visible::of_variables(&machine, Some("1,0"), order).unwrap_err().contains("only the driver knows"));
        }
        assert_eq!(places(&Visible::of_variables(&alike(), Some("3,1"), None).unwrap()), [3, 1]);
        // A UUID is one in any order.
        assert_eq!(places(&Visible::of_variables(&machine, Some("GPU-5,GPU-0"), None).unwrap()), [5, 0]);
    }

    /// Field case A53 (vllm-project/vllm#41848, #46132, #41776).
    #[test]
    fn lists_are_read_as_the_driver_reads_them() {
        let machine = alike();
        let of = |list| Visible::of_variables(&machine, Some(list), None).unwrap();
        let seen = |list| places(&of(list));
        assert_eq!((seen("0, 2"), seen("0,,2"), seen("-1"), seen("2,-1,3")), (vec![0, 2], vec![0], vec![], vec![2]));
        assert_eq!((seen(""), seen("0,0"), seen("nine"), seen("7,8,1")), (vec![], vec![], vec![], vec![7]));
        assert_eq!(seen("GPU-447b61d8-0000,GPU-117b61d8"), [4, 1]);
        // Which of all eight it would be is not said.
        assert_eq!(seen("1,GPU-,0"), [1]);
        assert_eq!(of("2,-1,3").note.as_deref(), Some("the list ends at its entry 2, '-1', which names no device"));
        let mig = of("MIG-GPU-447b61d8-0000/1/0");
        assert_eq!((mig.devices[0].gpu, mig.devices[0].mig), (Some(4), true));
        assert!(mig.note.unwrap().contains("no P2P and no IPC"));
        assert_eq!(of("MIG-0b8a").devices, [Device { gpu: None, uuid: None, mig: true }]);
    }

    #[test]
    fn without_the_variable_all_are_visible() {
        assert!(Visible::of_variables(&alike(), None, None).unwrap().is_plain(&alike()));
        assert!(!Visible::of_variables(&alike(), Some("1,0"), None).unwrap().is_plain(&alike()));
    }

    proptest! {
        #[test]
        fn no_list_breaks_it(list in "([0-9]{1,3}|GPU-|MIG-|[0-9a-f]{0,9}|,|/| |-1|\\PC){0,12}") {
            for machine in [mixed(), alike(), Machine::default()] {
                if let Ok(visible) = Visible::of_variables(&machine, Some(&list), Some("PCI_BUS_ID")) {
                    prop_assert!(visible.devices.iter().all(|device| device.gpu.is_none_or(|gpu| gpu < machine.gpus.len())));
                }
            }
        }
    }
}
