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
