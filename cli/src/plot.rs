//! Drawings of time and bandwidth over the size of the message, as SVG.

mod layout;

use std::{fs, path::Path};

use anyhow::{Context, Result, anyhow};
use plotters::{
    coord::Shift,
    coord::ranged1d::Ranged,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use layout::{Levels, Scale, bytes_name, linear_ticks, log_ticks, size_ticks};

/// A drawing: one row of two panels, or several below each other.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) title: String,
    pub(crate) subtitle: String,
    /// What the second panel shows, and what it is of size over time.
    pub(crate) bandwidth: (&'static str, f64),
    pub(crate) rows: Vec<Row>,
}

/// What stands in one row.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) heading: String,
    pub(crate) series: Vec<Series>,
    pub(crate) borders: Vec<Border>,
}

/// One candidate.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    /// Bytes, and microseconds.
    pub(crate) points: Vec<(u64, f64)>,
    /// Drawn broad, below all others: what is chosen.
    pub(crate) chosen: bool,
}

/// Where one hands over to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Border {
    pub(crate) bytes: u64,
    pub(crate) label: String,
}

impl Border {
    /// At so many bytes.
    pub(crate) fn at(bytes: u64, what: &str) -> Border {
        Border { bytes, label: format!("{what} at {}", bytes_name(bytes)) }
    }

    /// To what is taken from so many bytes on.
    pub(crate) fn to(bytes: u64, name: &str) -> Border {
        Border { bytes, label: format!("{name} from {}", bytes_name(bytes)) }
    }
}

/// From how many bytes on the second is faster, if it is at the largest size of both, along straight lines of the
/// logarithms.
pub(crate) fn crossing(first: &[(u64, f64)], second: &[(u64, f64)]) -> Option<u64> {
    let both: Vec<(f64, f64)> = first
        .iter()
        .filter_map(|&(bytes, us)| {
            let (_, other) = second.iter().find(|(size, _)| *size == bytes)?;
            Some(((bytes as f64).log2(), (other / us).ln()))
        })
        .collect();
    let (_, at_last) = *both.last()?;
    if at_last >= 0.0 {
        return None;
    }
    let slower = both.iter().rposition(|&(_, loss)| loss >= 0.0);
    let at = match slower.map(|index| (both[index], both[index + 1])) {
        None => both[0].0,
        Some(((below, loss), (above, gain))) => below + (above - below) * loss / (loss - gain),
    };
    Some(at.exp2().round() as u64)
}

const WIDTH: u32 = 1120;
const HEAD: u32 = 64;
const PANELS: u32 = 400;
const LEGEND_LINE: u32 = 24;
/// Of a level of labels of borders, of which there may be so many.
const LABEL: u32 = 15;
const LEVELS: usize = 4;
/// Around the frame of a panel.
const LEFT: u32 = 20 + 62;
const RIGHT: u32 = 20;

const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FAINT: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
const BORDER: RGBColor = RGBColor(0x77, 0x77, 0x77);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Dot,
    Square,
    Triangle,
    Cross,
}

/// The colours of Okabe and Ito, which stay apart for colour-blind eyes. A colour is a way to move data, a mark the
/// hops, so that a candidate looks alike in all drawings.
fn look(name: &str) -> (RGBColor, Mark) {
    let mark = match name {
        name if name.starts_with("one-shot") => Mark::Dot,
        name if name.starts_with("two-shot") => Mark::Square,
        name if name.starts_with("nccl") => Mark::Triangle,
        _ => Mark::Cross,
    };
    let color = match name {
        name if name.starts_with("nccl") => RGBColor(0xd5, 0x5e, 0x00),
        name if name.ends_with("-pull") => RGBColor(0x56, 0xb4, 0xe9),
        name if name.ends_with("-ll") => RGBColor(0x00, 0x9e, 0x73),
        name if name.ends_with("-direct") => RGBColor(0xcc, 0x79, 0xa7),
        "one-shot" | "two-shot" => RGBColor(0x00, 0x72, 0xb2),
        _ => BLACK,
    };
    (color, mark)
}

/// Colours and marks of names that have no look of their own.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    BLACK,
];
const MARKS: [Mark; 4] = [Mark::Dot, Mark::Square, Mark::Triangle, Mark::Cross];

/// How each name looks: its own way, or where two would look alike, all by their order.
#[derive(Clone, Debug)]
struct Looks(Vec<(String, RGBColor, Mark)>);

impl Looks {
    fn of(names: &[(&str, bool)]) -> Looks {
        let own: Vec<_> = names.iter().map(|(name, _)| look(name)).collect();
        let alike = (0..own.len()).any(|index| own[..index].contains(&own[index]));
        let place =
            |index: usize| (COLOURS[index % COLOURS.len()], MARKS[(index / COLOURS.len() + index) % MARKS.len()]);
        let of = |(index, (name, _)): (usize, &(&str, bool))| {
            let (color, mark) = if alike { place(index) } else { own[index] };
            ((*name).to_owned(), color, mark)
        };
        Looks(names.iter().enumerate().map(of).collect())
    }

    fn get(&self, name: &str) -> (RGBColor, Mark) {
        self.0.iter().find(|(known, ..)| known == name).map_or((BLACK, Mark::Cross), |&(_, color, mark)| (color, mark))
    }
}

impl Figure {
    /// Writes it beside and then renames, as reports are.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(".partial");
        let located = || format!("can't write {}", path.display());
        fs::write(&beside, self.svg()?).with_context(located)?;
        fs::rename(&beside, path).with_context(located)
    }

    pub(crate) fn svg(&self) -> Result<String> {
        let names = self.names();
        let (legend, looks) = (legend_lines(&names), Looks::of(&names));
        let height = HEAD + PANELS * self.rows.len() as u32 + LEGEND_LINE * (legend.len() as u32 + 1);
        let mut text = String::new();
        {
            let root = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
            root.fill(&WHITE).map_err(drawing)?;
            label(&root, &self.title, (WIDTH as i32 / 2, 14), (HPos::Center, VPos::Top), 22, &INK)?;
            label(&root, &self.subtitle, (WIDTH as i32 / 2, 40), (HPos::Center, VPos::Top), 14, &BORDER)?;
            for (number, row) in self.rows.iter().enumerate() {
                self.row(&root, row, &looks, HEAD + PANELS * number as u32)?;
            }
            let mut top = (HEAD + PANELS * self.rows.len() as u32 + LEGEND_LINE / 2) as i32;
            for line in legend {
                for (left, name, chosen) in line {
                    legend_entry(&root, (left, top), name, chosen, looks.get(name))?;
                }
                top += LEGEND_LINE as i32;
            }
            root.present().map_err(drawing)?;
        }
        Ok(text)
    }

    /// Every candidate once, the chosen first.
    fn names(&self) -> Vec<(&str, bool)> {
        let mut names: Vec<(&str, bool)> = Vec::new();
        for series in self.rows.iter().flat_map(|row| &row.series) {
            if !names.iter().any(|(name, _)| *name == series.name) {
                names.push((&series.name, series.chosen));
            }
        }
        names.sort_by_key(|(_, chosen)| !chosen);
        names
    }

    fn row(&self, root: &Area<'_>, row: &Row, looks: &Looks, top: u32) -> Result<()> {
        label(root, &row.heading, (24, top as i32 + 2), (HPos::Left, VPos::Top), 16, &INK)?;
        let (_, rest) = root.split_vertically(top as i32 + 20);
        let (area, _) = rest.split_vertically(PANELS as i32 - 20);
        let (left, right) = area.split_horizontally(WIDTH as i32 / 2);
        let times = |us: f64, _: u64| us;
        let (name, factor) = self.bandwidth;
        let bandwidths = |us: f64, bytes: u64| bytes as f64 / (us * 1e3) * factor;
        panel(&left, row, looks, &Axis { name: "time of a call (µs)", logarithmic: true, of: &times })?;
        panel(&right, row, looks, &Axis { name, logarithmic: false, of: &bandwidths })
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// What a panel shows of a candidate.
struct Axis<'a> {
    name: &'a str,
    logarithmic: bool,
    /// Of microseconds and bytes.
    of: &'a dyn Fn(f64, u64) -> f64,
}

impl Axis<'_> {
    fn place(&self, us: f64, bytes: u64) -> f64 {
        let value = (self.of)(us, bytes);
        if self.logarithmic { value.log10() } else { value }
    }
}

fn panel(area: &Area<'_>, row: &Row, looks: &Looks, axis: &Axis<'_>) -> Result<()> {
    let shown = |series: &Series| -> Vec<(f64, f64)> {
        let points = series.points.iter().filter(|&&(bytes, us)| bytes > 0 && us > 0.0);
        points.map(|&(bytes, us)| ((bytes as f64).log2(), axis.place(us, bytes))).collect()
    };
    let lines: Vec<(&Series, Vec<(f64, f64)>)> = row.series.iter().map(|series| (series, shown(series))).collect();
    let all = || lines.iter().flat_map(|(_, points)| points.iter().copied());
    let Some((x, y)) = range(all().map(|(x, _)| x)).zip(range(all().map(|(_, y)| y))) else { return Ok(()) };
    let y = match axis.logarithmic {
        true => (y.0 - 0.1, y.1 + 0.1),
        false => (0.0, (y.1 * 1.08).max(1e-3)),
    };
    let x = (x.0 - 0.3, x.1 + 0.3);
    let y_ticks = if axis.logarithmic { log_ticks(y) } else { linear_ticks(y.1) };
    let width = area.dim_in_pixel().0;
    let scale = Scale::new(x, Vec::new());
    let mut levels = Levels::new(LEVELS);
    let labels: Vec<_> = row
        .borders
        .iter()
        .map(|border| ((border.bytes as f64).log2(), &border.label))
        .filter(|(at, _)| (x.0..=x.1).contains(at))
        .map(|(at, text)| {
            let frame = (LEFT as i32, (width - RIGHT) as i32);
            let (middle, level) = levels.place(scale.map(&at, frame), text, frame.0..frame.1);
            (at, text, middle, level)
        })
        .collect();
    let top = 6 + LABEL * (1 + labels.iter().map(|label| label.3).max().unwrap_or(0)) as u32;
    let mut chart = ChartBuilder::on(area)
        .margin_top(top)
        .margin_right(RIGHT)
        .margin_left(LEFT - 62)
        .x_label_area_size(44)
        .y_label_area_size(62)
        .build_cartesian_2d(Scale::new(x, size_ticks(x)), Scale::new(y, y_ticks))
        .map_err(drawing)?;
    let logarithmic = axis.logarithmic;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .label_style(("sans-serif", 14).into_font().color(&INK))
        .axis_desc_style(("sans-serif", 15).into_font().color(&INK))
        .x_desc("size of the message")
        .y_desc(axis.name)
        .x_label_formatter(&|x| bytes_name(x.exp2().round() as u64))
        .y_label_formatter(&|&y| layout::number(if logarithmic { 10f64.powf(y) } else { y }))
        .draw()
        .map_err(drawing)?;
    for (at, text, middle, level) in labels {
        let line = PathElement::new([(at, y.0), (at, y.1)], BORDER.mix(0.8).stroke_width(1));
        chart.draw_series([line]).map_err(drawing)?;
        let bottom = (top - 3 - LABEL * level as u32) as i32;
        label(area, text, (middle, bottom), (HPos::Center, VPos::Bottom), 13, &BORDER)?;
    }
    let (chosen, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|(series, _)| series.chosen);
    for (series, points) in chosen.into_iter().chain(others) {
        let (color, mark) = looks.get(&series.name);
        let style = if series.chosen { color.mix(0.75).stroke_width(6) } else { color.stroke_width(2) };
        chart.draw_series(LineSeries::new(points.iter().copied(), style)).map_err(drawing)?;
        if series.chosen {
            let dots = points.iter().map(|&point| Circle::new(point, 4, color.filled()));
            chart.draw_series(dots).map_err(drawing)?;
            continue;
        }
        let points = points.iter().copied();
        match mark {
            Mark::Dot => {
                chart.draw_series(points.map(|point| EmptyElement::at(point) + Circle::new((0, 0), 3, color.filled())))
            }
            Mark::Square => chart.draw_series(
                points.map(|point| EmptyElement::at(point) + Rectangle::new([(-3, -3), (3, 3)], color.filled())),
            ),
            Mark::Triangle => chart.draw_series(
                points.map(|point| EmptyElement::at(point) + TriangleMarker::new((0, 0), 5, color.filled())),
            ),
            Mark::Cross => chart.draw_series(
                points.map(|point| EmptyElement::at(point) + Cross::new((0, 0), 4, color.stroke_width(2))),
            ),
        }
        .map_err(drawing)?;
    }
    Ok(())
}

/// The legend's entries by line: where each starts.
fn legend_lines<'a>(names: &[(&'a str, bool)]) -> Vec<Vec<(i32, &'a str, bool)>> {
    const SAMPLE: i32 = 44;
    const GAP: i32 = 26;
    let mut lines = vec![Vec::new()];
    let mut left = 64;
    for &(name, chosen) in names {
        let width = SAMPLE + layout::text_width(name, 15) + GAP;
        if left + width > WIDTH as i32 {
            lines.push(Vec::new());
            left = 64;
        }
        let line = lines.len() - 1;
        lines[line].push((left, name, chosen));
        left += width;
    }
    lines
}

fn legend_entry(
    root: &Area<'_>,
    (left, top): (i32, i32),
    name: &str,
    chosen: bool,
    (color, mark): (RGBColor, Mark),
) -> Result<()> {
    let style = if chosen { color.mix(0.75).stroke_width(6) } else { color.stroke_width(2) };
    root.draw(&PathElement::new([(left, top), (left + 34, top)], style)).map_err(drawing)?;
    let middle = (left + 17, top);
    match (chosen, mark) {
        (true, _) => root.draw(&Circle::new(middle, 4, color.filled())),
        (_, Mark::Dot) => root.draw(&Circle::new(middle, 3, color.filled())),
        (_, Mark::Square) => {
            let (x, y) = middle;
            root.draw(&Rectangle::new([(x - 3, y - 3), (x + 3, y + 3)], color.filled()))
        }
        (_, Mark::Triangle) => root.draw(&TriangleMarker::new(middle, 5, color.filled())),
        (_, Mark::Cross) => root.draw(&Cross::new(middle, 4, color.stroke_width(2))),
    }
    .map_err(drawing)?;
    label(root, name, (left + 44, top), (HPos::Left, VPos::Center), 15, &INK)
}

fn label(
    root: &Area<'_>,
    text: &str,
    at: (i32, i32),
    (horizontal, vertical): (HPos, VPos),
    size: u32,
    color: &RGBColor,
) -> Result<()> {
    let style = ("sans-serif", size).into_font().color(color).pos(Pos::new(horizontal, vertical));
    root.draw(&Text::new(text.to_owned(), at, style)).map_err(drawing)
}

/// The least and the greatest; `None` of nothing.
fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, value| {
        let (least, greatest) = range.unwrap_or((value, value));
        Some((f64::min(least, value), f64::max(greatest, value)))
    })
}

/// The drawing's errors borrow what they were drawn on.
fn drawing(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing failed: {error}")
}

#[cfg(test)]
mod tests;
