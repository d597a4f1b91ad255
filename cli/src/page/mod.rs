//! `peersum page`: pictures of a machine and of what was measured on it, in one file that opens without a network.
//!
//! [`graph`] draws the topology, [`matrices`] what [`heat`] makes of matrices, and [`curves`] time and bandwidth over the size. Colours follow
//! what the reader's system prefers, light or dark.

mod graph;
mod heat;
mod matrices;
mod svg;
#[cfg(test)]
mod tests;

use std::{fs, path::Path, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::{
    bandwidth,
    model::{fit::Fit, hops::Parameters, runs::Run},
    plot::{Border, Figure, Row, Series, crossing},
    topo,
};
pub(crate) use graph::graph;
pub(crate) use matrices::matrices;

/// What `peersum page` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Writes the page here; an older one is replaced
    #[arg(short = 'o', long, value_name = "FILE.html")]
    output: PathBuf,

    /// Writes each picture to this folder too, as SVG
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,

    /// Draws the topology in this file, which `nvidia-smi topo -m` printed or NCCL wrote, and not this machine's
    #[arg(long, value_name = "FILE", conflicts_with = "root")]
    from: Option<PathBuf>,

    /// Reads DIR/sys, DIR/proc and DIR/nvml.json instead of this machine's
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,

    /// Draws the matrices of a report of `peersum p2p --json`
    #[arg(long, value_name = "FILE.json")]
    p2p: Option<PathBuf>,

    /// Draws what nccl-tests or `peersum perf` measured (text, JSON, CSV), with alpha and beta fitted to it; can be
    /// given several times
    #[arg(long, value_name = "FILE")]
    results: Vec<PathBuf>,

    /// Draws the limit by the model of hops too: what `peersum probe -o` wrote
    #[arg(long, value_name = "FILE", requires = "results")]
    parameters: Option<PathBuf>,
}

/// A drawing.
#[derive(Clone, Debug)]
pub(crate) struct Picture {
    pub(crate) title: String,
    pub(crate) svg: String,
}

/// Runs the subcommand.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let mut pictures = Vec::new();
    let mut notes = Vec::new();
    let seen = topo::look(arguments.from.as_deref(), arguments.root.as_deref());
    match seen {
        Ok(seen) if seen.matrix.devices.is_empty() => notes.push("No GPU and no NIC is seen here.".to_owned()),
        Ok(seen) => {
            pictures.push(graph(&seen.matrix, seen.machine.as_ref()));
            notes.push(format!("The topology is from {}.", seen.sources.join(", ")));
            notes.extend(seen.unseen.iter().map(|unseen| format!("Not seen: {unseen}")));
        }
        // What was asked for must be there; this machine may have nothing to show.
        Err(error) if arguments.from.is_some() || arguments.root.is_some() => return Err(error),
        Err(error) => notes.push(format!("{error:#}")),
    }
    if let Some(file) = &arguments.p2p {
        let text = topo::text(file)?;
        pictures.extend(matrices(&text).with_context(|| format!("can't use {}", file.display()))?);
    }
    let parameters =
        arguments.parameters.as_deref().map(Parameters::read).transpose()?.map(|(parameters, _)| parameters);
    for file in &arguments.results {
        let text = topo::text(file)?;
        let runs = Run::parse(&text).with_context(|| format!("can't use {}", file.display()))?;
        pictures.extend(measured(&runs, parameters.as_ref())?);
    }
    ensure!(!pictures.is_empty(), "there is nothing to draw: {}", notes.join(" "));
    if let Some(folder) = &arguments.svg {
        fs::create_dir_all(folder).with_context(|| format!("can't make the folder {}", folder.display()))?;
        for (number, picture) in pictures.iter().enumerate() {
            let name: String = picture
                .title
                .chars()
                .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
                .collect();
            write(&folder.join(format!("{number:02}-{}.svg", name.trim_matches('-'))), &picture.svg)?;
        }
    }
    write(&arguments.output, &html("A machine, and what was measured on it", &notes.join("\n"), &pictures))?;
    let count = if pictures.len() == 1 { "1 picture is".into() } else { format!("{} pictures are", pictures.len()) };
    println!("{count} in {}", arguments.output.display());
    Ok(ExitCode::SUCCESS)
}

/// Writes a file beside and then renames it.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".partial");
    let located = || format!("can't write {}", path.display());
    fs::write(&beside, text).with_context(located)?;
    fs::rename(&beside, path).with_context(located)
}

/// A page of text and pictures.
pub(crate) fn html(title: &str, text: &str, pictures: &[Picture]) -> String {
    let mut body = String::new();
    for picture in pictures {
        // In a narrow window drawings shrink as far as they can be read, and scroll from there on.
        let least = dimensions(&picture.svg).map_or(0.0, |(width, _)| 0.6 * width);
        body.push_str(&format!("<figure style=\"--least:{least:.0}px\">\n{}</figure>\n", apart(&picture.svg)));
    }
    let title = svg::escaped(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\
         body{{font-family:sans-serif;margin:2em;background:#ffffff;color:#222222}}\
         h1{{font-size:1.6em}}figure{{margin:2em 0;overflow-x:auto}}pre{{overflow-x:auto}}\
         figure>svg{{display:block;max-width:100%;min-width:var(--least);height:auto}}\
         @media (prefers-color-scheme:dark){{body{{background:#161616;color:#e6e6e6}}}}\
         </style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}<pre>{}</pre>\n</body>\n</html>\n",
        svg::escaped(text)
    )
}

/// A drawing to stand in a page, where no XML declaration may be.
fn apart(svg: &str) -> &str {
    svg.find("<svg").map_or("", |start| &svg[start..])
}

/// One drawing of several, below each other.
pub(crate) fn curves(title: &str, figures: impl IntoIterator<Item = Figure>) -> Result<Picture> {
    let mut body = String::new();
    let (mut width, mut height) = (0.0f64, 0.0f64);
    for figure in figures {
        let svg = svg::themed(&figure.svg()?);
        let (of_width, of_height) = dimensions(&svg).context("a drawing has no size")?;
        let inner = apart(&svg).replacen("<svg", &format!("<svg y=\"{height:.0}\""), 1);
        body.push_str(&inner);
        width = width.max(of_width);
        height += of_height;
    }
    ensure!(!body.is_empty(), "there is nothing to draw");
    let svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 \
         {width:.0} {height:.0}\" role=\"img\">\n<title>{}</title>\n{body}</svg>\n",
        svg::escaped(title)
    );
    Ok(Picture { title: title.into(), svg })
}

fn dimensions(svg: &str) -> Option<(f64, f64)> {
    let document = roxmltree::Document::parse(svg).ok()?;
    let of = |name: &str| document.root_element().attribute(name)?.parse().ok();
    Some((of("width")?, of("height")?))
}

/// Where another run becomes the fastest, and which: between two sizes that both have, along straight lines of the
/// logarithms.
fn crossovers<'a>(runs: &[&'a Run]) -> Vec<(u64, &'a Run)> {
    let mut sizes: Vec<u64> = runs.iter().flat_map(|run| run.points.iter().map(|point| point.bytes)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let us = |run: &Run, bytes: u64| run.points.iter().find(|point| point.bytes == bytes).map(|point| point.us);
    let fastest = |bytes: u64| {
        let timed = runs.iter().enumerate().filter_map(|(index, run)| Some((index, us(run, bytes)?)));
        timed.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(index, _)| index)
    };
    let change = |pair: &[u64]| {
        let (before, after) = (fastest(pair[0])?, fastest(pair[1])?);
        // One that ends is not overtaken.
        let points = |run: &Run| Some([(pair[0], us(run, pair[0])?), (pair[1], us(run, pair[1])?)]);
        let (before, run) = (points(runs[before])?, runs[after]);
        Some((crossing(&before, &points(run)?)?, run))
    };
    sizes.windows(2).filter_map(change).collect()
}

/// What was measured, the fit to it, and the limit of the hops; a figure for each number of ranks.
fn measured(runs: &[Run], parameters: Option<&Parameters>) -> Result<Vec<Picture>> {
    let mut counts: Vec<u32> = runs.iter().filter_map(|run| run.ranks).filter(|&ranks| ranks > 1).collect();
    counts.sort_unstable();
    counts.dedup();
    ensure!(!counts.is_empty(), "the results don't say how many ranks there were, so there is no bus bandwidth");
    let mut pictures = Vec::new();
    for count in counts {
        let of: Vec<_> = runs.iter().filter(|run| run.ranks == Some(count)).collect();
        let name = |run: &Run| if run.label.is_empty() { run.tool.clone() } else { run.label.clone() };
        let mut series: Vec<_> = of
            .iter()
            .map(|run| Series {
                name: name(run),
                points: run.points.iter().map(|point| (point.bytes, point.us)).collect(),
                chosen: false,
            })
            .collect();
        let mut sizes: Vec<_> = of.iter().flat_map(|run| run.points.iter().map(|point| point.bytes)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut borders = Vec::new();
        // Of one of them, or models would hide what was measured: that which goes farthest, and is fastest there.
        let reach = |run: &&&Run| run.points.last().map(|point| (point.bytes, std::cmp::Reverse(point.us.to_bits())));
        let fitted = of.iter().max_by_key(reach).and_then(|run| Some((run, Fit::of(run).ok()?)));
        if let Some((run, fit)) = fitted {
            series.push(Series {
                name: format!("model of {}: {:.1} µs + bytes / {:.0} GB/s", name(run), fit.alpha_us, fit.gb_per_s),
                points: run.points.iter().map(|point| (point.bytes, fit.us(point.bytes))).collect(),
                chosen: false,
            });
            let half = fit.half_bytes().round() as u64;
            borders.push(Border::at(half, "half of the time is alpha"));
        }
        if let Some(parameters) = parameters {
            let limit = |bytes: u64| parameters.best(count, bytes as f64);
            series.push(Series {
                name: "limit by hops".into(),
                points: sizes.iter().filter_map(|&bytes| Some((bytes, limit(bytes)?.1.us()))).collect(),
                chosen: false,
            });
            for pair in sizes.windows(2) {
                let (Some((from, _)), Some((to, _))) = (limit(pair[0]), limit(pair[1])) else { continue };
                if from != to {
                    borders.push(Border::to(pair[1], &format!("limit: {}", to.name())));
                }
            }
        }
        borders.extend(crossovers(&of).into_iter().map(|(bytes, run)| Border::to(bytes, &name(run))));
        let title = format!("Time and bus bandwidth of {count} ranks");
        let figure = Figure {
            title: format!("All-reduce by {count} ranks"),
            subtitle: of.first().map(|run| run.tool.clone()).unwrap_or_default(),
            bandwidth: (
                "busbw (GB/s)",
                of.first().and_then(|run| run.bus_factor()).unwrap_or(bandwidth::bus_factor(count as usize)),
            ),
            rows: vec![Row { heading: String::new(), series, borders }],
        };
        pictures.push(curves(&title, [figure])?);
    }
    Ok(pictures)
}
