use super::*;

fn figure(series: &[(&str, bool)]) -> Figure {
    let points = |factor: f64| (10..=20).map(|power| (1u64 << power, factor * (1.0 + f64::from(power - 10)))).collect();
    let series = series.iter().enumerate().map(|(number, &(name, chosen))| Series {
        name: name.into(),
        points: points(1.0 + number as f64),
        chosen,
    });
    let borders = [(32 << 10, "two-shot-ll from 32 KiB"), (40 << 10, "nccl from 40 KiB"), (1 << 30, "never seen")];
    Figure {
        title: "2 ranks <on> \"one\" & the same".into(),
        subtitle: "bf16, sum".into(),
        bandwidth: ("busbw (GB/s)", 1.0),
        rows: vec![Row {
            heading: "tensors anywhere".into(),
            series: series.collect(),
            borders: borders.map(|(bytes, label)| Border { bytes, label: label.into() }).to_vec(),
        }],
    }
}

/// The content of all elements of this name.
fn texts(svg: &str) -> Vec<String> {
    let starts = svg.split("<text ").skip(1);
    starts.map(|rest| rest.split_once('>').unwrap().1.split_once("</text>").unwrap().0.trim().to_owned()).collect()
}

/// An attribute of every element of this name.
fn attributes(svg: &str, element: &str, attribute: &str) -> Vec<String> {
    let (element, start) = (format!("<{element} "), format!(" {attribute}=\""));
    svg.split(&element)
        .skip(1)
        .map(|rest| rest.split_once('>').unwrap().0)
        .filter_map(|element| {
            let element = format!(" {element}");
            Some(element.split_once(&start)?.1.split_once('"')?.0.to_owned())
        })
        .collect()
}

#[test]
fn every_candidate_has_a_line_of_its_own_colour_and_is_in_the_legend() {
    let names = [("peersum", true), ("one-shot-ll", false), ("two-shot", false), ("nccl", false)];
    let svg = figure(&names).svg().unwrap();
    let shown = texts(&svg);
    for (name, _) in names {
        assert_eq!(shown.iter().filter(|text| *text == name).count(), 1, "{name} in {shown:?}");
    }
    // Two panels, with a broad line of what is chosen in each, and one in the legend.
    let widths = attributes(&svg, "polyline", "stroke-width");
    assert_eq!(widths.iter().filter(|width| *width == "6").count(), 3, "{widths:?}");
    let mut colors: Vec<_> = attributes(&svg, "polyline", "stroke");
    colors.sort();
    colors.dedup();
    for color in ["#000000", "#009E73", "#0072B2", "#D55E00"] {
        assert!(colors.iter().any(|drawn| drawn == color), "{color} in {colors:?}");
    }
}

#[test]
fn axes_have_binary_sizes_and_microseconds_and_borders_their_labels() {
    let shown = texts(&figure(&[("peersum", true)]).svg().unwrap());
    for text in
        ["1 KiB", "1 MiB", "time of a call (µs)", "busbw (GB/s)", "size of the message", "tensors anywhere", "5"]
    {
        assert!(shown.iter().any(|drawn| drawn == text), "{text} in {shown:?}");
    }
    let times = |text: &str| shown.iter().filter(|drawn| *drawn == text).count();
    assert_eq!((times("nccl from 40 KiB"), times("two-shot-ll from 32 KiB"), times("never seen")), (2, 2, 0));
}

#[test]
fn labels_of_borders_do_not_overlap() {
    let svg = figure(&[("peersum", true)]).svg().unwrap();
    let boxes: Vec<_> = svg
        .split("<text ")
        .skip(1)
        .filter(|rest| rest.contains("from 32 KiB") || rest.contains("from 40 KiB"))
        .map(|rest| {
            let number = |name: &str| {
                let value = rest.split_once(&format!("{name}=\"")).unwrap().1.split_once('"').unwrap().0;
                value.parse::<i32>().unwrap()
            };
            let text = rest.split_once('>').unwrap().1.split_once("</text>").unwrap().0.trim();
            (number("x"), number(" y"), layout::text_width(text, 13))
        })
        .collect();
    assert_eq!(boxes.len(), 4);
    for (index, a) in boxes.iter().enumerate() {
        for b in &boxes[..index] {
            assert!((a.0 - b.0).abs() >= (a.2 + b.2) / 2 || (a.1 - b.1).abs() >= LABEL as i32, "{a:?} {b:?}");
        }
    }
}

#[test]
fn what_means_something_to_xml_is_escaped() {
    let svg = figure(&[("peersum", true)]).svg().unwrap();
    assert!(!svg.contains("<on>") && svg.contains("&lt;on&gt;") && svg.contains("&amp; the same"), "{svg}");
}

#[test]
fn one_size_or_none_is_a_drawing_too() {
    let mut figure = figure(&[("peersum", true), ("nccl", false)]);
    for series in &mut figure.rows[0].series {
        series.points.truncate(1);
    }
    assert!(figure.svg().unwrap().contains("1 KiB"));
    for series in &mut figure.rows[0].series {
        series.points = vec![(0, 1.0)];
    }
    assert!(figure.svg().unwrap().contains("</svg>"));
}

#[test]
fn a_file_that_can_not_be_written_is_named() {
    let error = figure(&[("peersum", true)]).write(Path::new("/nowhere/at/all.svg")).unwrap_err();
    assert!(format!("{error:#}").contains("/nowhere/at/all.svg"), "{error:#}");
}

#[test]
fn curves_cross_where_the_second_stays_faster() {
    let first = [(1 << 10, 2.0), (1 << 12, 4.0), (1 << 14, 8.0)];
    // Along straight lines of the logarithms, equal in the middle between the last two sizes.
    assert_eq!(crossing(&first, &[(1 << 10, 4.0), (1 << 12, 8.0), (1 << 14, 4.0)]), Some(1 << 13));
    assert_eq!(crossing(&first, &[(1 << 10, 1.0), (1 << 12, 8.0), (1 << 14, 9.0)]), None);
    assert_eq!(crossing(&first, &[(1 << 12, 1.0), (1 << 14, 1.0)]), Some(1 << 12));
    assert_eq!(crossing(&first, &[]), None);
}
