//! A matrix as a heat map.

use super::{
    Picture,
    svg::{Anchor, Svg},
};

/// A cell: a figure, a word in its place such as an error, or nothing.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Cell {
    Value(f64),
    Word(String),
    Bad(String),
    Nothing,
}

/// A heat map: rows are where data come from, columns where they go.
#[derive(Clone, Debug)]
pub(crate) struct Heat {
    pub(crate) title: String,
    pub(crate) unit: String,
    pub(crate) labels: Vec<String>,
    pub(crate) cells: Vec<Vec<Cell>>,
}

const CELL: (f64, f64) = (72.0, 40.0);
const LEFT: f64 = 130.0;
const TOP: f64 = 96.0;
/// A letter of the title takes no more, on average, in the widest of the usual fonts.
const TITLE_LETTER: f64 = 10.5;

impl Heat {
    pub(crate) fn picture(&self) -> Picture {
        let count = self.labels.len() as f64;
        // Within a device there is much more than between two, which would make all between them look alike.
        let shown = |(row, column): (usize, usize)| row != column || self.labels.len() == 1;
        let values: Vec<f64> = self
            .cells
            .iter()
            .enumerate()
            .flat_map(|(row, cells)| cells.iter().enumerate().map(move |(column, cell)| ((row, column), cell)))
            .filter_map(|(place, cell)| match cell {
                Cell::Value(value) if shown(place) => Some(*value),
                _ => None,
            })
            .collect();
        let most = values.iter().copied().fold(0.0, f64::max);
        // Words have no scale below them.
        let below = if most > 0.0 { 84.0 } else { 24.0 };
        let title = format!("{} ({})", self.title, self.unit);
        let width = (LEFT + count * CELL.0 + 40.0).max(560.0).max(56.0 + TITLE_LETTER * title.chars().count() as f64);
        let mut svg = Svg::new(width, TOP + count * CELL.1 + below);
        svg.text("ink", (28.0, 28.0), Anchor::Start, 18.0, &title);
        svg.text("soft", (LEFT + count * CELL.0 / 2.0, TOP - 34.0), Anchor::Middle, 13.0, "to");
        svg.text("soft", (28.0, TOP + count * CELL.1 / 2.0 + 4.0), Anchor::Start, 13.0, "from");
        for (index, label) in self.labels.iter().enumerate() {
            let (x, y) = (LEFT + (index as f64 + 0.5) * CELL.0, TOP + (index as f64 + 0.5) * CELL.1 + 5.0);
            svg.text("ink", (x, TOP - 10.0), Anchor::Middle, 13.0, label);
            svg.text("ink", (LEFT - 10.0, y), Anchor::End, 13.0, label);
        }
        for (row, cells) in self.cells.iter().enumerate() {
            for (column, cell) in cells.iter().enumerate() {
                let at = (LEFT + column as f64 * CELL.0 + 1.0, TOP + row as f64 * CELL.1 + 1.0);
                let size = (CELL.0 - 2.0, CELL.1 - 2.0);
                let middle = (at.0 + size.0 / 2.0, at.1 + size.1 / 2.0 + 5.0);
                match cell {
                    Cell::Value(value) if shown((row, column)) => {
                        let part = if most > 0.0 { (value / most).clamp(0.0, 1.0) } else { 0.0 };
                        svg.rectangle("heat", at, size, 0.08 + 0.92 * part);
                        let class = if part > 0.55 { "onheat" } else { "ink" };
                        svg.text(class, middle, Anchor::Middle, 14.0, &figure(*value));
                    }
                    Cell::Value(value) => {
                        svg.rectangle("empty", at, size, 1.0);
                        svg.text("soft", middle, Anchor::Middle, 13.0, &figure(*value));
                    }
                    Cell::Word(word) => {
                        svg.rectangle("empty", at, size, 1.0);
                        svg.text("soft", middle, Anchor::Middle, 13.0, word);
                    }
                    Cell::Bad(word) => {
                        svg.rectangle("bad", at, size, 1.0);
                        svg.text("onheat", middle, Anchor::Middle, 14.0, word);
                    }
                    Cell::Nothing => svg.rectangle("empty", at, size, 1.0),
                }
            }
        }
        let y = TOP + count * CELL.1 + 26.0;
        if most > 0.0 {
            for step in 0..20 {
                let part = f64::from(step) / 19.0;
                svg.block("heat", (LEFT + f64::from(step) * 12.0, y), (12.0, 14.0), 0.08 + 0.92 * part);
            }
            svg.text("soft", (LEFT - 8.0, y + 12.0), Anchor::End, 12.0, "0");
            svg.text("soft", (LEFT + 248.0, y + 12.0), Anchor::Start, 12.0, &format!("{} {}", figure(most), self.unit));
        }
        let on_diagonal = |(row, cells): (usize, &Vec<Cell>)| matches!(cells.get(row), Some(Cell::Value(_)));
        if self.labels.len() > 1 && self.cells.iter().enumerate().any(on_diagonal) {
            let note = "on the diagonal: within the device's own memory, not coloured";
            svg.text("soft", (LEFT, y + 36.0), Anchor::Start, 12.0, note);
        }
        Picture { title: self.title.clone(), svg: svg.finish(&self.title) }
    }
}

fn figure(value: f64) -> String {
    match value.abs() {
        magnitude if magnitude >= 100.0 => format!("{value:.0}"),
        magnitude if magnitude >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
