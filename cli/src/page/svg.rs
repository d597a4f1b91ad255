//! Writes SVG by classes, whose colours are for light and for dark.

use std::fmt::Write;

/// A drawing that grows.
pub(super) struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// Where text stands to its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Classes, with their style in light and in dark. Blue and orange stay apart for colour-blind eyes.
const STYLE: &str = "\
text{font-family:sans-serif;font-size:13px}\
.ground{fill:#ffffff}.ink{fill:#222222}.soft{fill:#666666}\
.box{fill:#f4f4f4;stroke:#bbbbbb}.part{fill:#e6e6e6;stroke:#999999}\
.gpu{fill:#cfe3f5;stroke:#0072b2;stroke-width:1.5}.nic{fill:#fbe6d0;stroke:#b86500;stroke-width:1.5}\
.pcie{stroke:#777777;stroke-width:1.5;fill:none}.nvlink{stroke:#0072b2;stroke-width:3;fill:none}\
.fabric{fill:#0072b2}.onfabric{fill:#ffffff}\
.unknown{stroke:#b86500;stroke-width:2;stroke-dasharray:5 4;fill:none}\
.heat{fill:#0072b2}.onheat{fill:#ffffff}.empty{fill:none;stroke:#bbbbbb}.bad{fill:#d55e00}\
@media (prefers-color-scheme:dark){\
.ground{fill:#161616}.ink{fill:#e6e6e6}.soft{fill:#a8a8a8}\
.box{fill:#222222;stroke:#555555}.part{fill:#303030;stroke:#777777}\
.gpu{fill:#12364f;stroke:#56b4e9}.nic{fill:#4a2f10;stroke:#e69f00}\
.pcie{stroke:#a0a0a0}.nvlink{stroke:#56b4e9}.fabric{fill:#56b4e9}.onfabric{fill:#101010}\
.unknown{stroke:#e69f00}.heat{fill:#56b4e9}.onheat{fill:#101010}.empty{stroke:#555555}.bad{fill:#e69f00}}";

/// What an SVG text may hold of it.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // XML has no other control characters, nor these two.
            '\n' | '\t' => escaped.push(character),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            character if character.is_control() => escaped.push('\u{fffd}'),
            character => escaped.push(character),
        }
    }
    escaped
}

impl Svg {
    pub(super) fn new(width: f64, height: f64) -> Svg {
        Svg { width, height, body: String::new() }
    }

    /// With round corners.
    pub(super) fn rectangle(&mut self, class: &str, at: (f64, f64), size: (f64, f64), opacity: f64) {
        self.rounded(class, at, size, opacity, 4);
    }

    /// With square corners, as parts of one thing have.
    pub(super) fn block(&mut self, class: &str, at: (f64, f64), size: (f64, f64), opacity: f64) {
        self.rounded(class, at, size, opacity, 0);
    }

    fn rounded(&mut self, class: &str, (x, y): (f64, f64), (width, height): (f64, f64), opacity: f64, radius: u32) {
        let opacity = if opacity < 1.0 { format!(" fill-opacity=\"{opacity:.3}\"") } else { String::new() };
        // To a string nothing can fail.
        let _ = writeln!(
            self.body,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
             rx=\"{radius}\"{opacity}/>"
        );
    }

    pub(super) fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let _ = writeln!(self.body, "<path class=\"{class}\" d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\"/>");
    }

    /// From one point to another on the same height, bent down by so much.
    pub(super) fn arc(&mut self, class: &str, (x1, y): (f64, f64), x2: f64, depth: f64) {
        let (middle, bend) = ((x1 + x2) / 2.0, y + 2.0 * depth);
        let _ =
            writeln!(self.body, "<path class=\"{class}\" d=\"M{x1:.1} {y:.1}Q{middle:.1} {bend:.1} {x2:.1} {y:.1}\"/>");
    }

    pub(super) fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, size: f64, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" \
             style=\"font-size:{size}px\">{}</text>",
            escaped(text)
        );
    }

    /// The whole; `title` is what readers of screens say.
    pub(super) fn finish(self, title: &str) -> String {
        let Svg { width, height, body } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 \
             {width:.0} {height:.0}\" role=\"img\">\n<title>{}</title>\n<style>{STYLE}</style>\n\
             <rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n{body}</svg>\n",
            escaped(title)
        )
    }
}

/// A drawing of plotters', whose colours are written out, with other colours for dark.
pub(super) fn themed(svg: &str) -> String {
    // What `plot` draws with, and what stands for it in the dark.
    const COLOURS: [(&str, &str); 10] = [
        ("#FFFFFF", "#161616"),
        ("#222222", "#e6e6e6"),
        ("#DDDDDD", "#3a3a3a"),
        ("#777777", "#a8a8a8"),
        ("#000000", "#e6e6e6"),
        ("#0072B2", "#56b4e9"),
        ("#D55E00", "#ff8c42"),
        ("#009E73", "#2fd1a5"),
        ("#CC79A7", "#e7a9cb"),
        ("#56B4E9", "#9bd3f5"),
    ];
    let mut style = String::from("<style>@media (prefers-color-scheme:dark){");
    for (light, dark) in COLOURS {
        let _ = write!(style, "[fill=\"{light}\"]{{fill:{dark}}}[stroke=\"{light}\"]{{stroke:{dark}}}");
    }
    style.push_str("}</style>");
    match svg.find("<svg").and_then(|start| Some(start + svg[start..].find('>')? + 1)) {
        Some(inside) => format!("{}{style}{}", &svg[..inside], &svg[inside..]),
        None => svg.to_owned(),
    }
}
