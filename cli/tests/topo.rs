//! `peersum topo` from the outside, over the fixtures.

use std::process::{Command, Output};

use serde_json::Value;

mod fixtures;

fn peersum(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peersum")).args(arguments).output().expect("the command starts")
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("the output is UTF-8")
}

fn topo(fixture: &str, flags: &[&str]) -> String {
    let folder = fixtures::unpack(fixture);
    stdout(&peersum(&[&["topo", "--root", folder.path().to_str().unwrap()], flags].concat()))
}

#[test]
fn the_matrix_has_gpus_nics_and_affinities() {
    let text = topo(fixtures::H200X8, &[]);
    for line in [
        "# Read from: sysfs, NVML 580.95.05",
        "      GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7  NIC0  NIC1  NIC2  NIC3  NIC4  NIC5  NIC6  NIC7  NIC8  \
         CPU Affinity    NUMA Affinity",
        "GPU0  X     NV18  NV18  NV18  NV18  NV18  NV18  NV18  PIX   NODE  NODE  NODE  SYS   SYS   SYS   SYS   NODE  \
         0-55,112-167    0",
        "  NIC8: eno1",
        "  GPU4: NVIDIA H200, 0000:9d:00.0",
        "    PCIe: 5.0 x16 now, 5.0 x16 at best: 63 GB/s one way",
        "    NVLink: generation 4, 18 of 18 links active, 25.0 GB/s each, 450 GB/s one way: through a switch",
        "    Nearest NIC: NIC4 (mlx5_4), PIX",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}\nis not in\n{text}");
    }
    assert!(!text.contains("Not seen"), "{text}");
    let text = topo(fixtures::BRIDGES4, &[]);
    assert!(
        text.contains("    NVLink: generation 3, 12 of 12 links active, 25.0 GB/s each, 300 GB/s one way: 12 to GPU1")
    );
}

#[test]
fn what_could_not_be_seen_is_said() {
    let text = topo(fixtures::LAPTOP, &[]);
    assert!(text.contains("# No GPU of NVIDIA's is here"), "{text}");
    assert!(text.contains("Not seen:\n\n  nvml.json: No such file"), "{text}");
    let empty = tempfile::tempdir().unwrap();
    let output = peersum(&["topo", "--root", empty.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("nothing of this machine can be seen"));
}

#[test]
fn this_machine_is_shown_whatever_it_is() {
    let output = peersum(&["topo"]);
    // Where there is no /sys there is nothing to show.
    assert!(matches!(output.status.code(), Some(0 | 2)), "{output:?}");
}

#[test]
fn what_the_command_prints_and_nccl_s_file_are_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let cells = |json: &str| -> Vec<Value> {
        let json: Value = serde_json::from_str(json).unwrap();
        assert_eq!((&json["schema"], &json["schema_version"]), (&"peersum-topo".into(), &1.into()));
        let rows = json["matrix"]["cells"].as_array().unwrap();
        rows.iter().flat_map(|row| row.as_array().unwrap().iter().map(|cell| cell["nvlinks"].clone())).collect()
    };
    let there = cells(&topo(fixtures::BRIDGES4, &["--json"]));
    assert_eq!(there[1], 12);
    let text = file("matrix.txt", &topo(fixtures::BRIDGES4, &[]));
    assert_eq!(cells(&stdout(&peersum(&["topo", "--json", "--from", &text]))), there);
    let xml = file("system.xml", &topo(fixtures::BRIDGES4, &["--nccl-xml"]));
    assert_eq!(cells(&stdout(&peersum(&["topo", "--json", "--from", &xml]))), there);
    let again = folder.path().join("again.xml");
    let output = peersum(&["topo", "--from", &xml, "--nccl-xml", again.to_str().unwrap()]);
    assert!(stdout(&output).contains("NV12"));
    // Cores are the same, whichever way they are written.
    assert_eq!(std::fs::read_to_string(&again).unwrap(), std::fs::read_to_string(&xml).unwrap());
}

#[test]
fn what_is_no_topology_is_an_error_with_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    for (text, why) in [
        ("", "no line names the columns"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "no line names the columns"),
        ("<system version=\"1\"><cpu", "no whole XML"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV4\n", "the rows of GPU1 are missing"),
    ] {
        std::fs::write(&path, text).unwrap();
        let output = peersum(&["topo", "--from", path.to_str().unwrap()]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(why) && output.stdout.is_empty(), "{error}");
    }
    std::fs::write(&path, "\tGPU0\nGPU0\t X \n").unwrap();
    let output = peersum(&["topo", "--from", path.to_str().unwrap(), "--nccl-xml"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("a matrix doesn't say where the devices are"));
}

/// Field case A52 (vllm-project/vllm#4233): what is shown is of the devices that CUDA shows, in its order.
#[test]
fn the_devices_that_cuda_shows_are_told_from_the_machine_s() {
    // NVLink is between GPU0 and GPU1, and between GPU2 and GPU3.
    let text = topo(
        &(fixtures::BRIDGES4.to_owned() + "env CUDA_VISIBLE_DEVICES=3,1\nenv CUDA_DEVICE_ORDER=PCI_BUS_ID\n"),
        &[],
    );
    let part = text.split("CUDA's devices").nth(1).unwrap_or_else(|| panic!("{text}"));
    assert!(part.contains("  device 0: GPU3") && part.contains("  device 1: GPU1"), "{part}");
    let row = part.lines().find(|line| line.starts_with("0=GPU3")).unwrap_or_else(|| panic!("{part}"));
    assert!(row.contains("SYS") && !row.contains("NV12"), "{row}");
    // Two that are connected.
    let text = topo(&(fixtures::BRIDGES4.to_owned() + "env CUDA_VISIBLE_DEVICES=3,2\n"), &[]);
    assert!(text.split("CUDA's devices").nth(1).unwrap().contains("NV12"), "{text}");
    assert!(!topo(fixtures::BRIDGES4, &[]).contains("CUDA's devices"));
}

#[test]
fn a_page_has_the_graph_and_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("topo.html");
    topo(fixtures::BRIDGES4, &["--html", file.to_str().unwrap()]);
    let page = std::fs::read_to_string(&file).unwrap();
    assert!(page.contains("<svg") && page.contains(">NV12<") && page.contains("Nearest NIC"), "{page}");
}
