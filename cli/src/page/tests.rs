//! Pictures of fixtures.

use super::*;
use crate::model::hops::Given;
use crate::topology::{
    fixtures::{ALL, BRIDGES4, H200X8, unpack},
    matrix::Matrix,
    read,
    source::Folder,
};

fn drawn(text: &str) -> String {
    let folder = unpack(text);
    let machine = read::read(&Folder::new(folder.path()).unwrap());
    graph(&Matrix::of(&machine), Some(&machine)).svg
}

#[test]
fn every_fixture_is_drawn_as_whole_xml_with_all_of_its_devices() {
    for (name, text) in ALL {
        let folder = unpack(text);
        let machine = read::read(&Folder::new(folder.path()).unwrap());
        let matrix = Matrix::of(&machine);
        let svg = graph(&matrix, Some(&machine)).svg;
        assert!(roxmltree::Document::parse(&svg).is_ok(), "{name}");
        for device in &matrix.devices {
            assert!(svg.contains(&format!(">{}</text>", device.label)), "{name}: {}", device.label);
        }
        assert!(svg.contains("prefers-color-scheme:dark"), "{name}");
    }
}

#[test]
fn links_are_drawn_as_they_are_known() {
    let board = drawn(H200X8);
    assert!(
        board.contains("NVLink, all to all") && board.contains(">NV18<") && board.contains("PCIe switch"),
        "{board}"
    );
    let bridges = drawn(BRIDGES4);
    assert!(bridges.contains(">NV12<") && !bridges.contains("all to all"), "{bridges}");
    // Unknown is neither linked nor unlinked.
    let silent = drawn(&BRIDGES4.replace("links=12@0000:21:00.0", ""));
    assert!(silent.contains("whether there is NVLink is unknown"), "{silent}");
}

#[test]
fn what_a_matrix_does_not_say_is_not_drawn() {
    let text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-3\t0\nGPU1\tNV4\t X \t0-3\t0\n";
    let (matrix, _) = crate::topology::smi::parse(text).unwrap();
    let svg = graph(&matrix, None).svg;
    assert!(svg.contains(">NV4<") && svg.contains("PCIe, place unknown") && !svg.contains("root port"), "{svg}");
    assert!(drawn(BRIDGES4).contains("root port"));
}

#[test]
fn names_with_signs_of_xml_break_nothing() {
    let svg = drawn(&H200X8.replace("NVIDIA H200", "<b>&\u{1}]]>"));
    assert!(roxmltree::Document::parse(&svg).is_ok());
    assert!(svg.contains("&lt;b&gt;&amp;"));
}

#[test]
fn a_heat_map_has_axes_a_legend_and_words_where_figures_are_missing() {
    let report = r#"{"schema": "peersum-p2p", "schema_version": 1, "devices": [{"ordinal": 0}, {"ordinal": 3}],
        "verdicts": [[null, "bad"], ["good", null]],
        "one_way": [{"title": "copy engine, P2P writes", "unit": "GB/s", "cells": [[{"value": 2000.0}, {"value": 391.5}],
        [{"error": "cuLaunchKernel failed"}, null]]}]}"#;
    let pictures = matrices(report).unwrap();
    assert_eq!(pictures.len(), 2);
    assert!(pictures[0].svg.contains(">BAD<") && pictures[0].svg.contains("device 3"));
    let svg = &pictures[1].svg;
    for part in [">392<", ">error<", ">from<", ">to<", "392 GB/s", "One way, copy engine, P2P writes (GB/s)"] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    let title = "Whether data arrive (compared by the owner of the memory)";
    let (width, _) = dimensions(&pictures[0].svg).unwrap();
    assert!(pictures[0].svg.contains(title) && width > 10.0 * title.len() as f64, "{title} on {width}");
    for wrong in ["{}", "[]", r#"{"schema": "peersum-topo"}"#, r#"{"schema": "peersum-p2p", "schema_version": 1}"#] {
        assert!(matrices(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn what_was_measured_is_drawn_with_its_model_and_where_algorithms_change() {
    let text = (10..27).fold(String::from("algorithm,ranks,bytes,time_us\n"), |text, shift| {
        let bytes = 1u64 << shift;
        text + &format!("nccl,8,{bytes},{:.3}\n", 20.0 + 1.75 * bytes as f64 / 300e3)
    });
    let (parameters, _) = Given::default().complete().unwrap();
    let pictures = measured(&Run::parse(&text).unwrap(), Some(&parameters)).unwrap();
    let svg = &pictures[0].svg;
    for part in
        ["model of nccl: 20.0 µs + bytes / 300 GB/s", "limit by hops", "two-shot-ll from", "time of a call (µs)"]
    {
        assert!(svg.contains(part), "{part}");
    }
    assert!(roxmltree::Document::parse(svg).is_ok());
}

#[test]
fn where_one_run_overtakes_another_is_drawn() {
    let text = (10..24).fold(String::from("algorithm,ranks,bytes,time_us\n"), |text, shift| {
        let bytes = 1u64 << shift;
        let us = |alpha: f64, times: f64| alpha + times * bytes as f64 / 300e3;
        // Both take the same at 2 us x 300 GB/s / 5.25 = 114 KB; the third is always slower, and goes on alone.
        let two = format!("two-shot,8,{bytes},{:.4}\none-shot,8,{bytes},{:.4}\n", us(4.0, 1.75), us(2.0, 7.0));
        text + if shift < 22 { two.as_str() } else { "" } + &format!("nccl,8,{bytes},{:.4}\n", us(20.0, 1.75))
    });
    let runs = Run::parse(&text).unwrap();
    let all: Vec<_> = runs.iter().collect();
    let [(bytes, run)] = crossovers(&all)[..] else { panic!("{:?}", crossovers(&all)) };
    assert_eq!(run.label, "two-shot");
    assert!((100_000..130_000).contains(&bytes), "{bytes}");
    assert!(measured(&runs, None).unwrap()[0].svg.contains("two-shot from"));
}

#[test]
fn a_page_needs_nothing_from_elsewhere() {
    let page = html("A <title>", "text & more", &[Picture { title: "p".into(), svg: drawn(H200X8) }]);
    assert!(
        page.starts_with("<!DOCTYPE html>") && page.contains("A &lt;title&gt;") && page.contains("text &amp; more")
    );
    // The namespace of SVG is a name, and no address that is fetched.
    let rest = page.replace("http://www.w3.org/2000/svg", "");
    assert!(!rest.contains("http") && !rest.contains("<script") && !rest.contains("@import"));
    assert!(!page.contains("<?xml"));
}

proptest::proptest! {
    #[test]
    fn no_report_breaks_the_matrices(text in "(\\{|\\}|\\[|\\]|\"schema\": \"peersum-p2p\"|, |\"schema_version\": 1|\"devices\": |\"one_way\": |\"cells\": |\"value\": |[0-9e.-]{1,6}|null|\\PC){0,40}") {
        let _ = matrices(&text);
    }

    /// Cells of any kind where figures are expected.
    #[test]
    fn no_cell_breaks_a_matrix(cells in proptest::collection::vec("(null|1e999|-5|\\{\"value\": [0-9]{1,20}\\}|\\{\"error\": \"<x>\"\\}|\"good\"|\\[\\])", 4)) {
        let [a, b, c, d] = &cells[..] else { unreachable!() };
        let text = format!(
            r#"{{"schema": "peersum-p2p", "schema_version": 1, "devices": [{{"ordinal": 0}}, {{"ordinal": "x"}}],
                "verdicts": [[{a}, {b}]], "one_way": [{{"title": "<t>", "unit": "GB/s", "cells": [[{a}, {b}], [{c}, {d}]]}}]}}"#
        );
        if let Ok(pictures) = matrices(&text) {
            for picture in pictures {
                proptest::prop_assert!(roxmltree::Document::parse(&picture.svg).is_ok(), "{}", picture.svg);
            }
        }
    }
}
