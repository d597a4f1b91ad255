//! What the doctor finds on the fixtures, and on fixtures with something wrong.

use super::{Benchmarks, examine, finding::Outcome};
use crate::topology::{
    fixtures::{self, BRIDGES4, EPYC2X2, EPYC8, H200X8, LAPTOP, PCIE4, VM1},
    read,
    source::Folder,
};

fn examined(text: &str) -> Outcome {
    let folder = fixtures::unpack(text);
    let source = Folder::new(folder.path()).unwrap();
    examine(&source, &read::read(&source), None, &Benchmarks::default())
}

fn ids(outcome: &Outcome) -> Vec<&'static str> {
    outcome.findings.iter().map(|finding| finding.id).collect()
}

/// The text of a finding.
fn text(outcome: &Outcome, id: &str) -> String {
    let finding = outcome.findings.iter().find(|finding| finding.id == id);
    format!("{:?}", finding.unwrap_or_else(|| panic!("{id} is not among {outcome:#?}")))
}

#[test]
fn a_machine_without_a_fault_has_no_finding() {
    let outcome = examined(PCIE4);
    assert_eq!((ids(&outcome), &outcome.unknown[..]), (vec![], &[][..]));
    assert_eq!(outcome.exit_code(), 0);
    // Two sockets that NVLink connects are a note.
    let outcome = examined(H200X8);
    assert_eq!((ids(&outcome), &outcome.unknown[..]), (vec!["numa-spread"], &[][..]));
    assert_eq!(outcome.exit_code(), 0);
}

/// Field cases A13 (NVIDIA/nccl#2079) and A12 (pytorch/pytorch#84803).
#[test]
fn bridges_that_redirect_are_named_and_only_these() {
    let outcome = examined(&PCIE4.replacen(
        "18:04.0 class=0x060400 id=1000:c010 numa=0 cpus=0-31 link=16.0x16 max=16.0x16 group=5 acs=0x00",
        "18:04.0 class=0x060400 id=1000:c010 numa=0 cpus=0-31 link=16.0x16 max=16.0x16 group=5 acs=0x1d",
        1,
    ));
    assert_eq!(ids(&outcome), ["acs-redirect"]);
    let found = text(&outcome, "acs-redirect");
    assert!(found.contains("0000:18:04.0 ACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+"), "{found}");
    assert!(found.contains("at 1 PCIe bridge, between GPU0-GPU1, GPU1-GPU2, GPU1-GPU3; GPU1-NIC0"), "{found}");
    assert!(!found.contains("0000:18:00.0"), "{found}");
    // SrcValid alone redirects nothing.
    assert_eq!(ids(&examined(&PCIE4.replace("acs=0x00", "acs=0x01"))), Vec::<&str>::new());
}

/// Four cards below one switch, ACS on at every port: P2P is granted, NCCL takes it, and all of it makes the detour.
#[test]
fn four_cards_with_acs_on_are_a_severe_finding_with_a_remedy() {
    let outcome = examined(&PCIE4.replace("acs=0x00", "acs=0x1d"));
    assert_eq!((ids(&outcome), outcome.exit_code()), (vec!["acs-redirect"], 3));
    let found = text(&outcome, "acs-redirect");
    assert!(found.contains("at 5 PCIe bridges, between all 6 pairs of GPUs"), "{found}");
    assert!(found.contains("--write-acs-fix") && found.contains("pci=disable_acs_redir"), "{found}");
}

#[test]
fn acs_that_can_not_be_read_is_unknown_and_not_off() {
    let outcome = examined(&PCIE4.replace("acs=0x00", "acs=unreadable"));
    assert_eq!((ids(&outcome), outcome.exit_code()), (vec![], 2));
    let unknown = format!("{:?}", outcome.unknown);
    assert!(unknown.contains("ACS of the bridges 0000:18:00.0, 0000:18:04.0"), "{unknown}");
    assert!(unknown.contains("64 bytes") && unknown.contains("sudo peersum doctor"), "{unknown}");
    assert!(!format!("{:?}", outcome.fine).contains("ACS"));
}

#[test]
fn both_causes_of_host_memory_are_named_each_with_its_remedy() {
    let outcome = examined(EPYC2X2);
    assert_eq!(ids(&outcome), ["nccl-p2p-level", "acs-redirect", "iommu-translating", "numa-spread"]);
    let level = text(&outcome, "nccl-p2p-level");
    assert!(level.contains("GPU0-GPU1, GPU2-GPU3: the path is PHB, beyond PXB, from NCCL's default"), "{level}");
    assert!(
        level.contains("two causes") && level.contains("NCCL_P2P_LEVEL=SYS") && level.contains("do both"),
        "{level}"
    );
    assert!(text(&outcome, "acs-redirect").contains("--write-acs-fix"));
    assert!(text(&outcome, "acs-redirect").contains("groups of their own are normal"));
}

/// NVIDIA/nccl#2080.
#[test]
fn nccl_s_rule_is_named_whatever_acs_is() {
    let outcome = examined(EPYC8);
    let level = text(&outcome, "nccl-p2p-level");
    assert!(level.contains("all 28 pairs") && level.contains("whether ACS redirects too is unknown"), "{level}");
    let off = examined(&EPYC8.replace("acs=unreadable", "acs=0x00"));
    assert!(text(&off, "nccl-p2p-level").contains("ACS is not the cause"));
    let set = examined(&(EPYC8.replace("acs=unreadable", "acs=0x00") + "env NCCL_P2P_LEVEL=SYS\n"));
    assert_eq!(ids(&set), ["numa-spread"]);
    let disabled = examined(&(PCIE4.to_owned() + "file /etc/nccl.conf NCCL_P2P_DISABLE=1\n"));
    assert_eq!(ids(&disabled), ["nccl-p2p-level", "variable"]);
    assert!(text(&disabled, "variable").contains("is set in /etc/nccl.conf"));
    assert!(text(&disabled, "nccl-p2p-level").contains("Unset NCCL_P2P_DISABLE"));
}

/// Field case A55 (Project-HAMi/HAMi#2103).
#[test]
fn nvlink_that_should_be_there_is_missed() {
    let none = examined(&H200X8.replace("links=18@switch", "links=18@switch inactive=18"));
    assert_eq!(ids(&none)[0], "nvlink-missing");
    assert!(text(&none, "nvlink-missing").contains("0 of 18 NVLinks are active"));
    assert!(text(&none, "nvlink-missing").contains("4 NVSwitches"));
    let some = examined(&H200X8.replacen("links=18@switch", "links=18@switch inactive=2", 1));
    assert_eq!(ids(&some), ["nvlink-degraded", "numa-spread"]);
    assert!(text(&some, "nvlink-degraded").contains("GPU0 (NVIDIA H200): 16 of 18"));
    let refused: String = H200X8.replace(" ok\n", " not_supported\n").replace("p2p all not_supported", "p2p all ok");
    assert!(ids(&examined(&refused)).contains(&"nvlink-missing"));
    let silent = examined(&H200X8.replacen("links=18@switch", "", 1));
    assert_eq!(silent.exit_code(), 2, "{silent:#?}");
    // Bridges between two and two are no fault, and no group of four.
    assert!(text(&examined(BRIDGES4), "nvlink-pairwise").contains("GPU0-GPU1, GPU2-GPU3 alone"));
}

/// Field case A70 (NVIDIA/nvbandwidth#45): the reason of each pair.
#[test]
fn p2p_that_is_refused_has_a_reason() {
    let outcome =
        examined(&PCIE4.replace("p2p all ok", "p2p all ok\np2p 0 1 chipset_not_supported\np2p 2 3 gpu_not_supported"));
    assert_eq!(ids(&outcome), ["p2p-refused", "p2p-refused"]);
    let both = format!("{:?}", outcome.findings);
    assert!(both.contains("between GPU0-GPU1") && both.contains("CNS: the chipset"), "{both}");
    assert!(both.contains("between GPU2-GPU3") && both.contains("GNS: the GPU"), "{both}");
    let silent = examined(&PCIE4.replace("p2p all ok", ""));
    assert_eq!((ids(&silent), silent.exit_code()), (vec![], 2));
}

#[test]
fn pcie_links_below_their_best_are_found() {
    let gpu = "id=10de:26b9 numa=0 cpus=0-31 link=16.0x16 max=16.0x16";
    let with = |link: &str| examined(&PCIE4.replacen(gpu, &gpu.replace("link=16.0x16", link), 1));
    assert!(text(&with("link=16.0x8"), "pcie-width").contains("GPU0 (0000:19:00.0) has 8 lanes of 16"));
    assert!(text(&with("link=8.0x16"), "pcie-generation").contains("PCIe 3.0 of PCIe 4.0"));
    // Idle GPUs go down to the first generation.
    assert_eq!(with("link=2.5x16").exit_code(), 0);
    let slot = examined(&PCIE4.replacen(gpu, &gpu.replace("link=16.0x16 max=16.0x16", "link=16.0x16 max=32.0x16"), 1));
    assert_eq!(ids(&slot), Vec::<&str>::new());
    let switch = "17:00.0 class=0x060400 id=1000:c010 numa=0 cpus=0-31 link=16.0x16";
    let narrow =
        examined(&PCIE4.replacen(switch, &switch.replace("x16", "x4"), 1).replace("x4 max=16.0x4", "x4 max=16.0x16"));
    assert!(text(&narrow, "pcie-width").contains("the switch 0000:17:00.0 above GPU0"), "{narrow:#?}");
}

#[test]
fn nics_far_from_gpus_are_found() {
    let away = examined(
        &H200X8.replace("ib=mlx5_0 ", "").replace("ib=mlx5_1 ", "").replace("ib=mlx5_2 ", "").replace("ib=mlx5_3 ", ""),
    );
    let far = text(&away, "nic-far");
    assert!(far.contains("GPU0, GPU1, GPU2, GPU3: nearest is SYS") && !far.contains("GPU4"), "{far}");
}

#[test]
fn limits_of_containers_are_found() {
    let container = PCIE4.replace("rw,nosuid,nodev", "rw,nosuid,nodev,size=65536k").replace("unlimited", "65536");
    let outcome = examined(&(container.replace("file /dev/nvidia2\n", "") + "file /.dockerenv\n"));
    assert_eq!(ids(&outcome), ["devices-missing", "shm-small", "memlock"]);
    assert!(
        text(&outcome, "shm-small").contains("64 MiB") && text(&outcome, "shm-small").contains("this is a container")
    );
    assert!(text(&outcome, "devices-missing").contains("/dev/nvidia2 is missing"));
    let plain = PCIE4.lines().filter(|line| !["nvml", "gpu", "p2p"].contains(&line.split(' ').next().unwrap()));
    let unserved = examined(&plain.collect::<Vec<_>>().join("\n"));
    assert!(text(&unserved, "no-driver").contains("4 GPUs are here, and NVML serves none"));
    let rdma = PCIE4.replace("file /dev/infiniband/uverbs0\n", "");
    assert_eq!(ids(&examined(&rdma)), ["rdma-devices-missing"]);
}

#[test]
fn modes_and_versions_are_found() {
    let with = |keys: &str| examined(&PCIE4.replacen("memory=45G", &format!("memory=45G {keys}"), 1));
    assert_eq!(ids(&with("mig=on")), ["mig"]);
    assert_eq!(with("mig=unknown").exit_code(), 2);
    assert_eq!(ids(&with("mode=prohibited")), ["compute-prohibited"]);
    assert_eq!(ids(&with("mode=exclusive_process")), ["compute-exclusive"]);
    let mps = examined(&(PCIE4.to_owned() + "env CUDA_MPS_PIPE_DIRECTORY=/tmp/mps\n"));
    assert_eq!((ids(&mps), mps.exit_code()), (vec!["mps"], 0));
    let small = examined(&PCIE4.replace("cc=8.9 memory=45G bar1=64G", "cc=8.9 memory=45G bar1=256M"));
    assert!(text(&small, "bar-small").contains("256 MiB"));
    let mismatch = examined(&PCIE4.replace("nvidia/version 580.95.05", "nvidia/version 570.124.06"));
    assert!(text(&mismatch, "driver-mismatch").contains("module 570.124.06, libraries 580.95.05"));
    let old = examined(&PCIE4.replace("580.95.05", "470.82.01"));
    assert_eq!(ids(&old), ["driver-old"]);
}

#[test]
fn machines_with_one_gpu_or_none_say_what_they_can() {
    let laptop = examined(LAPTOP);
    assert_eq!((ids(&laptop), laptop.exit_code()), (vec![], 2));
    assert!(format!("{:?}", laptop.unknown).contains("none of NVIDIA's is seen here"));
    let vm = examined(VM1);
    assert_eq!((ids(&vm), vm.exit_code()), (vec![], 2), "{vm:#?}");
    assert!(format!("{:?}", vm.unknown).contains("the PCIe link of GPU0"));
    assert!(vm.fine[0].contains("between GPUs: there is one"), "{vm:#?}");
    let mig = examined(&VM1.replace("memory=141G", "memory=141G mig=on"));
    assert_eq!((ids(&mig), mig.exit_code()), (vec!["mig"], 3));
}

#[test]
fn without_sysfs_places_are_unknown_and_nothing_is_called_fine_for_it() {
    let keep = ["nvml", "gpu", "p2p", "nvlink", "file"];
    let text: Vec<_> = PCIE4.lines().filter(|line| keep.contains(&line.split(' ').next().unwrap())).collect();
    let outcome = examined(&text.join("\n"));
    assert_eq!((ids(&outcome), outcome.exit_code()), (vec![], 2), "{outcome:#?}");
    let unknown = format!("{:?}", outcome.unknown);
    for part in ["ACS between GPU0-GPU1", "the PCIe link of GPU0", "whether NCCL has P2P", "the NUMA node of GPU0"] {
        assert!(unknown.contains(part), "{part}: {unknown}");
    }
    let fine = format!("{:?}", outcome.fine);
    assert!(["ACS", "PCIe", "NUMA", "NCCL: "].iter().all(|check| !fine.contains(check)), "{fine}");
}

#[test]
fn gpus_that_a_container_was_not_given_are_a_note() {
    let text: Vec<_> = PCIE4.lines().filter(|line| !line.starts_with("gpu 0000:1c")).collect();
    let outcome = examined(&text.join("\n"));
    assert_eq!((ids(&outcome), outcome.exit_code()), (vec!["gpus-hidden"], 0), "{outcome:#?}");
    assert!(self::text(&outcome, "gpus-hidden").contains("sysfs has 4, NVML 3"));
}

#[test]
fn the_exit_code_says_how_severe_the_worst_is() {
    let moderate = examined(&PCIE4.replace("iommu identity", "iommu DMA"));
    assert_eq!((ids(&moderate), moderate.exit_code()), (vec!["iommu-translating"], 1));
    // What can't be looked at makes nothing less severe, nor more.
    let both = examined(&PCIE4.replace("iommu identity", "iommu DMA").replace("acs=0x00", "acs=unreadable"));
    assert_eq!((both.exit_code(), both.unknown.len()), (1, 1));
    assert_eq!(examined(&PCIE4.replace("acs=0x00", "acs=0x1d")).exit_code(), 3);
}

/// Field case A54 (NVIDIA/NVSentinel#1485): that NVLinks can't be seen has another code than that there are none up.
#[test]
fn unknown_links_are_told_from_links_that_are_down() {
    let silent = examined(&H200X8.replace("links=18@switch", ""));
    assert_eq!(silent.exit_code(), 2, "{silent:#?}");
    assert!(silent.unknown.iter().any(|unknown| unknown.what.starts_with("NVLinks of GPU0")), "{silent:#?}");
    let down = examined(&H200X8.replace("links=18@switch", "links=18@switch inactive=18"));
    assert_eq!((ids(&down)[0], down.exit_code()), ("nvlink-missing", 3));
}

/// Field case A54: an empty place is no healthy machine.
#[test]
fn nothing_to_look_at_is_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let source = Folder::new(folder.path()).unwrap();
    let outcome = examine(&source, &read::read(&source), None, &Benchmarks::default());
    assert_eq!(outcome.exit_code(), 2);
    assert!(format!("{:?}", outcome.unknown).contains("can't be read"), "{outcome:#?}");
}
