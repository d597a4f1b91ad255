//! The model and the matrix over the fixtures.

use proptest::prelude::*;

use super::{
    acs::Acs,
    fixtures::{self, ALL, BRIDGES4, EPYC2X2, EPYC8, H100X8, H200X8, LAPTOP, PCIE4, VM1},
    machine::{Iommu, Machine},
    matrix::Matrix,
    nccl::{self, Decision, Path},
    read, smi,
    source::Folder,
    xml,
};

/// The machine of a fixture.
fn machine(text: &str) -> Machine {
    let folder = fixtures::unpack(text);
    read::read(&Folder::new(folder.path()).unwrap())
}

/// The cells of a row, as they are shown.
fn row(machine: &Machine, row: usize) -> Vec<String> {
    Matrix::of(machine).cells[row].iter().map(ToString::to_string).collect()
}

#[test]
fn a_board_with_switches_is_connected_all_to_all() {
    let machine = machine(H200X8);
    assert_eq!(machine.unseen, Vec::<String>::new());
    let first = row(&machine, 0);
    assert_eq!(first[1..8], ["NV18"; 7]);
    // Its own NIC is beside it in one switch; the others' are in its node, or not.
    assert_eq!(first[8..], ["PIX", "NODE", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS", "NODE"]);
    let matrix = Matrix::of(&machine);
    assert_eq!(matrix.devices[8].name.as_deref(), Some("mlx5_0"));
    assert_eq!((matrix.devices[5].numa, matrix.devices[5].cpus.as_deref()), (Some(1), Some("56-111,168-223")));
    assert_eq!((machine.nics[0].rdma, machine.nics[0].speed), (true, Some(400_000)));
    assert_eq!(machine.iommu, Iommu::Passthrough);
    // NVML tells the rate of the lanes, of which 25 GB/s are data.
    let of = |text| self::machine(text).gpus[0].nvlink_rate().unwrap() * 18.0;
    assert_eq!((of(H100X8), of(H200X8)), (450.0, 450.0));
    assert_eq!(row(&self::machine(H100X8), 7)[..7], ["NV18"; 7]);
}

#[test]
fn pcie_carries_its_lanes_less_their_encoding() {
    let shown = |speed, width| (super::machine::pcie_gb_per_s(speed, width) * 10.0).round() / 10.0;
    let x16 = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0].map(|speed| shown(speed, 16));
    assert_eq!(x16, [4.0, 8.0, 15.8, 31.5, 63.0, 118.0]);
    assert_eq!(shown(32.0, 8), 31.5);
}

/// Field case A55 (Project-HAMi/HAMi#2103): the remote end of each link is a switch; then some, then all are down.
#[test]
fn links_that_are_down_do_not_count() {
    let some = H200X8.replacen("links=18@switch", "links=18@switch inactive=2", 1);
    assert_eq!(row(&machine(&some), 0)[1..8], ["NV16"; 7]);
    assert_eq!(row(&machine(&some), 1)[2..8], ["NV18"; 6]);
    let none = H200X8.replace("links=18@switch", "links=18@switch inactive=18");
    assert_eq!(row(&machine(&none), 0)[1..8], ["NODE", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS"]);
    // Links that are up, and a fabric that isn't.
    let refused = H200X8.replace("nvlink 0 1 ok", "nvlink 0 1 not_supported");
    assert_eq!(row(&machine(&refused), 0)[1..3], ["NODE", "NV18"]);
}

/// Field case A51 (vllm-project/vllm#4159): active links of each GPU don't make all of them connected.
#[test]
fn links_to_one_peer_say_nothing_of_another() {
    let machine = machine(BRIDGES4);
    assert_eq!(row(&machine, 0)[1..], ["NV12", "SYS", "SYS"]);
    assert_eq!(row(&machine, 2), ["SYS", "SYS", "?", "NV12"]);
    let fully = machine.gpu_pairs().all(|(a, b)| Matrix::of(&machine).cells[a][b].linked());
    assert!(!fully);
}

#[test]
fn links_whose_far_end_is_unknown_link_nothing() {
    let links = machine(&BRIDGES4.replace("links=12@0000:21:00.0", "links=12"));
    let cell = Matrix::of(&links).cells[0][1];
    assert_eq!(cell.nvlinks, None);
    assert_eq!(Path::of(cell), None);
    let silent = machine(&BRIDGES4.replace("links=12@0000:21:00.0", ""));
    assert_eq!(Matrix::of(&silent).cells[0][1].nvlinks, None);
    assert!(silent.unseen.iter().any(|unseen| unseen.contains("the NVLinks of GPU 0")), "{:?}", silent.unseen);
    // One end says twelve, the other none.
    let one_sided = machine(&BRIDGES4.replace("links=12@0000:21:00.0", "links=0"));
    assert!(!Matrix::of(&one_sided).cells[0][1].linked());
}

#[test]
fn cards_below_one_switch_are_pix() {
    let machine = machine(PCIE4);
    assert_eq!(row(&machine, 0), ["?", "PIX", "PIX", "PIX", "PIX"]);
    let control = |machine: &Machine| {
        let bridge = &machine.functions[&"0000:18:04.0".parse().unwrap()];
        bridge.acs.clone()
    };
    assert!(matches!(control(&machine), Some(Acs::Control(control)) if !control.redirects()));
    let bridges = machine.bridges_between(machine.function_of(0).unwrap().1, machine.function_of(1).unwrap().1);
    let bridges: Vec<_> = bridges.iter().map(ToString::to_string).collect();
    // The two ports that the cards hang at, and not the one above them.
    assert_eq!(bridges, ["0000:18:00.0", "0000:18:04.0"]);
}

#[test]
fn cards_at_root_ports_are_node_and_sys() {
    let machine = machine(EPYC2X2);
    assert_eq!(row(&machine, 0), ["?", "NODE", "SYS", "SYS"]);
    assert_eq!(machine.iommu, Iommu::Translating);
    assert!(machine.cpu.is_amd());
}

/// NVIDIA/nccl#2080: 8 cards at root ports of AMD have no P2P by NCCL's default, whatever ACS is.
#[test]
fn nccl_s_rule_is_reproduced() {
    let decide = |text: &str, disable, level| {
        let machine = machine(text);
        let level = nccl::level(&machine, disable, level);
        nccl::decide(&machine, (0, 1), level)
    };
    assert_eq!(decide(EPYC8, None, None), Decision::TooFar(Path::Phb));
    assert_eq!(decide(EPYC8, None, Some("SYS")), Decision::P2p);
    assert_eq!(decide(EPYC8, None, Some("3")), Decision::P2p);
    assert_eq!(decide(PCIE4, None, None), Decision::P2p);
    assert_eq!(decide(PCIE4, Some("1"), None), Decision::TooFar(Path::Pix));
    assert_eq!(decide(H200X8, None, None), Decision::P2p);
    // Two GPUs on AMD have it across the sockets.
    let two: String = EPYC2X2
        .lines()
        .filter(|line| !line.contains("c1:00.0") && !line.contains("41:00.0"))
        .fold(String::new(), |text, line| text + line + "\n");
    assert_eq!(decide(&two, None, None), Decision::P2p);
    assert!(matches!(decide(&PCIE4.replace("all ok", "all chipset_not_supported"), None, None), Decision::Refused(_)));
    assert_eq!(decide(&PCIE4.replace("p2p all ok", ""), None, None), Decision::Unknown);
}

#[test]
fn a_machine_without_a_gpu_is_one_too() {
    let machine = machine(LAPTOP);
    assert!(machine.gpus.is_empty());
    assert!(machine.unseen.iter().any(|unseen| unseen.contains("nvml.json")), "{:?}", machine.unseen);
    assert_eq!(row(&machine, 0), ["?"]);
    assert_eq!(Matrix::of(&machine).devices[0].name.as_deref(), Some("wlp0s20f3"));
}

#[test]
fn a_virtual_machine_with_one_gpu_is_read() {
    let machine = machine(VM1);
    assert_eq!(row(&machine, 0), ["?", "PHB"]);
    assert_eq!(machine.numa_of(0), Some(0));
    assert_eq!(machine.iommu, Iommu::Off);
}

/// Field case A54 (NVIDIA/NVSentinel#1485, NVIDIA/go-dcgm#46): without the driver's library there is sysfs, which is named
/// as the source, and links are unknown.
#[test]
fn without_nvml_gpus_are_found_by_sysfs_and_links_are_unknown() {
    let text: String = H200X8
        .lines()
        .filter(|line| !["nvml", "gpu", "p2p", "nvlink"].contains(&line.split(' ').next().unwrap()))
        .fold(String::new(), |text, line| text + line + "\n");
    let machine = machine(&text);
    assert_eq!(machine.gpus.len(), 8);
    assert_eq!(Matrix::of(&machine).cells[0][1].nvlinks, None);
    assert_eq!(row(&machine, 0)[1..3], ["NODE", "NODE"]);
    assert_eq!(machine.sources, ["sysfs"]);
    assert!(machine.unseen.iter().any(|unseen| unseen.contains("NVLinks") && unseen.contains("unknown")));
}

#[test]
fn nccl_s_file_has_what_nccl_s_own_has() {
    let file = xml::write(&machine(H200X8));
    for line in [
        "  <cpu numaid=\"0\" affinity=\"000000ff,ffffffff,ffff0000,00000000,00ffffff,ffffffff\" arch=\"x86_64\" \
         vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"143\">",
        // The switch's upstream port; neither the root port nor the downstream ports.
        "    <pci busid=\"0000:16:00.0\" class=\"0x060400\" vendor=\"0x1000\" device=\"0xc030\" \
         subsystem_vendor=\"0x0000\" subsystem_device=\"0x0000\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">",
        "      <pci busid=\"0000:18:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x2335\" \
         subsystem_vendor=\"0x10de\" subsystem_device=\"0x18be\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">",
        "        <gpu dev=\"0\" sm=\"90\" rank=\"0\">",
        "          <nvlink target=\"0000:05:00.0\" count=\"18\" tclass=\"0x068000\"/>",
        "          <net name=\"mlx5_0\" dev=\"0\" speed=\"400000\" guid=\"0x1\"/>",
    ] {
        assert!(file.lines().any(|written| written == line), "{line}\nis not in\n{file}");
    }
    assert!(!file.contains("0000:15:01.0") && !file.contains("0000:17:00.0"), "{file}");
}

#[test]
fn nccl_s_file_comes_back_as_the_same_matrix() {
    for (name, text) in ALL {
        let machine = machine(text);
        let back = xml::parse(&xml::write(&machine)).unwrap_or_else(|error| panic!("{name}: {error:#}"));
        let (there, back) = (Matrix::of(&machine), Matrix::of(&back));
        assert_eq!(there.devices.len(), back.devices.len(), "{name}");
        for (a, b) in there.cells.iter().flatten().zip(back.cells.iter().flatten()) {
            // The file has no host bridges.
            let without_node = |cell: &super::matrix::Connection| cell.to_string().replace("NODE", "PHB");
            assert_eq!(without_node(a), without_node(b), "{name}");
        }
    }
}

#[test]
fn what_is_no_file_of_nccl_s_is_an_error() {
    let error = |text: &str| format!("{:#}", xml::parse(text).unwrap_err());
    assert!(error("").contains("no whole XML"));
    let whole = xml::write(&machine(PCIE4));
    assert!(error(&whole[..whole.len() / 2]).contains("no whole XML"));
    assert!(error("<topology/>").contains("not <system>"));
    assert!(error("<system version=\"2\"/>").contains("version 2"));
    assert!(error("<system version=\"1\"><cpu/></system>").contains("no numaid"));
    assert!(error(&whole.replace("0000:1a:00.0", "0000:19:00.0")).contains("stands there twice"));
    let above = whole.replacen("<pci busid=\"0000:19:00.0\"", "<gpu dev=\"9\"/><pci busid=\"0000:19:00.0\"", 1);
    assert!(error(&above).contains("0000:17:00.0 is a device, and has others below it"), "{}", error(&above));
    let many = whole
        .replace("numaid=\"0\"", "numaid=\"0\" host_hash=\"0x1\"")
        .replace("</system>", "<cpu numaid=\"1\" host_hash=\"0x2\"></cpu></system>");
    assert!(error(&many).contains("several hosts"));
    let deep = format!(
        "<system version=\"1\"><cpu numaid=\"0\">{}",
        "<pci busid=\"0000:01:00.0\" class=\"0x060400\">".repeat(5000)
    );
    assert!(error(&deep).contains("no whole XML"));
}

proptest! {
    /// Whatever is cut out of a file: it is an error, or links no pair that isn't linked.
    #[test]
    fn a_damaged_file_links_nothing(at in 0..6000usize, cut in 1..60usize, put in "[ \"<>/a-z0-9:.]{0,3}") {
        thread_local!(static WHOLE: (String, Vec<Vec<u32>>) = {
            let machine = machine(BRIDGES4);
            let matrix = Matrix::of(&machine);
            let links = matrix.cells.iter().map(|row| row.iter().map(|cell| cell.nvlinks.unwrap_or(0)).collect());
            (xml::write(&machine), links.collect())
        });
        WHOLE.with(|(whole, links)| {
            let from = at.min(whole.len());
            let damaged = format!("{}{put}{}", &whole[..from], &whole[(from + cut).min(whole.len())..]);
            if let Ok(machine) = xml::parse(&damaged) {
                let addresses: Vec<_> = ["01", "21", "81", "a1"].map(|bus| format!("0000:{bus}:00.0").parse().unwrap()).into();
                let matrix = Matrix::of(&machine);
                for (a, b) in machine.gpu_pairs().filter(|&(a, b)| matrix.cells[a][b].linked()) {
                    let place = |gpu: usize| addresses.iter().position(|&at| Some(at) == machine.gpus[gpu].address);
                    let (Some(a), Some(b)) = (place(a), place(b)) else { panic!("{damaged}") };
                    prop_assert!(links[a][b] > 0, "{}", damaged);
                }
            }
            Ok(())
        })?;
    }

    #[test]
    fn no_file_breaks_it(text in "(<system version=\"1\">|<cpu numaid=\"0\">|<pci busid=\"0000:01:00.0\" class=\"0x030200\">|</pci>|</cpu>|</system>|<gpu dev=\"0\"/>|<!--|\\PC){0,30}") {
        let _ = xml::parse(&text);
    }
}

#[test]
fn a_matrix_of_the_command_is_what_the_machine_s_own_is() {
    // As the command would print it.
    let machine = machine(EPYC2X2);
    let text = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n\
        GPU0\t X \tNODE\tSYS\tSYS\t0-63,128-191\t0\nGPU1\tNODE\t X \tSYS\tSYS\t0-63,128-191\t0\n\
        GPU2\tSYS\tSYS\t X \tNODE\t64-127,192-255\t1\nGPU3\tSYS\tSYS\tNODE\t X \t64-127,192-255\t1\n";
    let (read, _) = smi::parse(text).unwrap();
    let own = Matrix::of(&machine);
    assert_eq!(own.cells, read.cells);
    let places =
        |matrix: &Matrix| matrix.devices.iter().map(|device| (device.cpus.clone(), device.numa)).collect::<Vec<_>>();
    assert_eq!(places(&own), places(&read));
}
