//! The table, in nccl-tests' format to the column, so that what reads theirs reads this.

use std::io::{self, Write};

use crate::measure::{
    case::{Case, Placement},
    statistics::Spread,
};

/// The figures of one placement, as the table shows them. `None` is shown as `N/A`: the figure has no meaning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Half {
    pub(crate) time_us: f64,
    pub(crate) algbw: f64,
    pub(crate) busbw: Option<f64>,
    pub(crate) wrong: Option<u64>,
    pub(crate) spread: Option<Spread>,
}

/// The figures of another candidate beside them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OtherHalf {
    pub(crate) time_us: f64,
    pub(crate) busbw: Option<f64>,
    pub(crate) wrong: Option<u64>,
    /// Time of the first candidate over the time of this.
    pub(crate) ratio: f64,
}

/// Where a call's buffers are, in the order of the columns.
pub(crate) const HALVES: [Placement; 2] = [Placement::OutOfPlace, Placement::InPlace];

/// Columns of a half, of `-I`, and of another candidate.
const HALF: usize = 33;
const PER_ITERATION: usize = 34;
const OTHER: usize = 33;

/// The three lines over the columns. `per_iteration` adds the columns of `-I` to each half, and `others` those of other
/// candidates, under their names.
pub(crate) fn header(out: &mut dyn Write, per_iteration: bool, others: &[&str]) -> io::Result<()> {
    writeln!(out, "#")?;
    write!(out, "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}", "", "", "", "", "")?;
    for (number, name) in ["           out-of-place", "             in-place"].into_iter().enumerate() {
        let more = if per_iteration { PER_ITERATION } else { 0 };
        // The names of the halves stand where nccl-tests has them, and its line ends before its columns do.
        let width = if number == 1 && others.is_empty() { HALF - 2 } else { HALF + more };
        write!(out, "{name:width$}")?;
        for other in others {
            write!(out, "  {:-^width$}", format!(" {other} "), width = OTHER - 2)?;
        }
    }
    writeln!(out)?;
    for (first, half, more, other) in [
        (
            ["size", "count", "type", "redop", "root"],
            ["time", "algbw", "busbw", "#wrong"],
            ["i_min", "i_max", "i_p99", "i_cv"],
            ["time", "busbw", "#wrong", "ratio"],
        ),
        (
            ["(B)", "(elements)", "", "", ""],
            ["(us)", "(GB/s)", "(GB/s)", ""],
            ["(us)", "(us)", "(us)", "(%)"],
            ["(us)", "(GB/s)", "", ""],
        ),
    ] {
        write!(out, "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}", first[0], first[1], first[2], first[3], first[4])?;
        for _ in HALVES {
            write!(out, "  {:>7}  {:>6}  {:>6}  {:>6}", half[0], half[1], half[2], half[3])?;
            if per_iteration {
                write!(out, "  {:>7}  {:>7}  {:>7}  {:>5}", more[0], more[1], more[2], more[3])?;
            }
            for _ in others {
                write!(out, "  {:>7}  {:>6}  {:>6}  {:>6}", other[0], other[1], other[2], other[3])?;
            }
        }
        writeln!(out, " ")?;
    }
    Ok(())
}

/// The columns that say which row this is. All-reduce has no root: −1.
pub(crate) fn row_start(out: &mut dyn Write, case: &Case) -> io::Result<()> {
    write!(
        out,
        "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}",
        case.bytes(),
        case.count,
        type_name(case.dtype),
        case.op.to_string(),
        -1
    )
}

/// One half of a row.
pub(crate) fn half(out: &mut dyn Write, half: &Half, per_iteration: bool) -> io::Result<()> {
    let not_applicable = || "N/A".to_owned();
    write!(
        out,
        "  {:>7}  {:>6}  {:>6}  {:>6}",
        float(half.time_us, 7),
        float(half.algbw, 6),
        half.busbw.map_or_else(not_applicable, |busbw| float(busbw, 6)),
        half.wrong.map_or_else(not_applicable, |wrong| general(wrong as f64)),
    )?;
    if per_iteration {
        let figure = |of: fn(&Spread) -> f64, width| {
            half.spread.as_ref().map_or_else(not_applicable, |spread| float(of(spread), width))
        };
        write!(
            out,
            "  {:>7}  {:>7}  {:>7}  {:>5}",
            figure(|spread| spread.min_us, 7),
            figure(|spread| spread.max_us, 7),
            figure(|spread| spread.p99_us, 7),
            figure(|spread| spread.cv_percent, 5),
        )?;
    }
    Ok(())
}

/// The columns of another candidate in one half of a row; dashes where it did not run.
pub(crate) fn other(out: &mut dyn Write, other: Option<&OtherHalf>) -> io::Result<()> {
    let Some(other) = other else {
        return write!(out, "  {:>7}  {:>6}  {:>6}  {:>6}", "-", "-", "-", "-");
    };
    let not_applicable = || "N/A".to_owned();
    write!(
        out,
        "  {:>7}  {:>6}  {:>6}  {:>6}",
        float(other.time_us, 7),
        other.busbw.map_or_else(not_applicable, |busbw| float(busbw, 6)),
        other.wrong.map_or_else(not_applicable, |wrong| general(wrong as f64)),
        float(other.ratio, 6),
    )
}

/// The lines under the table. `wrong_tests` counts halves of rows with a wrong element, as nccl-tests does; `None` is
/// of a table that was not checked.
pub(crate) fn footer(out: &mut dyn Write, wrong_tests: Option<usize>, average_busbw: Option<f64>) -> io::Result<()> {
    let verdict = match wrong_tests {
        Some(0) => "0 OK".to_owned(),
        Some(count) => format!("{count} FAILED"),
        None => "N/A (not checked)".to_owned(),
    };
    writeln!(out, "# {:<20} : {verdict}", "Out of bounds values")?;
    let average = average_busbw.map_or_else(|| "N/A".to_owned(), general);
    writeln!(out, "# {:<20} : {average} ", "Avg bus bandwidth")
}

/// The name that nccl-tests has for a type.
pub(crate) fn type_name(dtype: peersum::DType) -> String {
    match dtype {
        peersum::DType::F32 => "float".into(),
        peersum::DType::F16 => "half".into(),
        peersum::DType::BF16 => "bfloat16".into(),
        other => other.to_string(),
    }
}

/// Two decimals, or as many as the width leaves room for, or an exponent.
fn float(value: f64, width: usize) -> String {
    for decimals in [2, 1, 0] {
        let text = format!("{value:.decimals$}");
        if text.len() <= width {
            return text;
        }
    }
    exponent(value, 1)
}

/// C's `%g`: six significant digits, without trailing zeros.
fn general(value: f64) -> String {
    const DIGITS: i32 = 6;
    if value == 0.0 {
        return "0".into();
    }
    // The exponent after rounding to that many digits: 999999.5 is 1e+06.
    let scientific = format!("{value:.*e}", DIGITS as usize - 1);
    let power: i32 = scientific.split_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0);
    if (-4..DIGITS).contains(&power) {
        trim(&format!("{value:.*}", (DIGITS - 1 - power) as usize)).to_owned()
    } else {
        let text = exponent(value, DIGITS as usize - 1);
        let (mantissa, power) = text.split_once('e').unwrap_or((&text, "+00"));
        format!("{}e{power}", trim(mantissa))
    }
}

fn trim(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

/// C's `%e`: at least two digits of exponent, and its sign.
fn exponent(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$e}");
    let (mantissa, power) = text.split_once('e').unwrap_or((&text, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    format!("{mantissa}e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs())
}

#[cfg(test)]
mod tests {
    use peersum::{DType, ReduceOp};

    use super::*;

    fn text(write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn figures(time_us: f64, algbw: f64, busbw: Option<f64>, wrong: Option<u64>) -> Half {
        Half { time_us, algbw, busbw, wrong, spread: Spread::of(&[1.0, 2.0, 3.0]) }
    }

    #[test]
    fn the_header_is_nccl_tests_own() {
        let want = [
            "#",
            "#                                                              out-of-place                       in-place          ",
            "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         ",
            "",
        ];
        assert_eq!(text(|out| header(out, false, &[])), want.join("\n"));
    }

    #[test]
    fn a_row_has_nccl_tests_columns() {
        let case = Case { count: 2_097_152, dtype: DType::F32, op: ReduceOp::Sum };
        let row = text(|out| {
            row_start(out, &case)?;
            half(out, &figures(120.34, 69.71, Some(121.99), Some(0)), false)?;
            half(out, &figures(118.90, 70.55, Some(123.47), Some(0)), false)
        });
        assert_eq!(
            row,
            "     8388608       2097152     float     sum      -1   120.34   69.71  121.99       0   118.90   70.55  \
             123.47       0"
        );
    }

    #[test]
    fn what_has_no_meaning_is_not_a_number() {
        let row = text(|out| half(out, &figures(1.0, 2.0, None, None), false));
        assert_eq!(row, "     1.00    2.00     N/A     N/A");
    }

    #[test]
    fn every_line_of_the_wide_table_is_as_long() {
        let case = Case { count: 1, dtype: DType::BF16, op: ReduceOp::Average };
        let head = text(|out| header(out, true, &[]));
        let row = text(|out| {
            row_start(out, &case)?;
            half(out, &figures(1.0, 2.0, None, Some(3)), true)?;
            half(out, &figures(1.0, 2.0, None, Some(3)), true)
        });
        assert_eq!(row.len(), head.lines().nth(2).unwrap().trim_end().len().max(row.len()));
        assert!(row.ends_with("     1.00     3.00     3.00  50.00"), "{row}");
        assert!(head.lines().nth(2).unwrap().ends_with("    i_min    i_max    i_p99   i_cv "), "{head}");
    }

    #[test]
    fn others_stand_under_their_names_beside_each_half() {
        for per_iteration in [false, true] {
            let head = text(|out| header(out, per_iteration, &["nccl", "one-shot"]));
            let case = Case { count: 1, dtype: DType::BF16, op: ReduceOp::Sum };
            let nccl = OtherHalf { time_us: 8.0, busbw: Some(2.5), wrong: Some(0), ratio: 0.5 };
            let row = text(|out| {
                row_start(out, &case)?;
                for _ in HALVES {
                    half(out, &figures(4.0, 2.0, None, Some(3)), per_iteration)?;
                    other(out, Some(&nccl))?;
                    other(out, None)?;
                }
                Ok(())
            });
            let lines: Vec<_> = head.lines().map(str::trim_end).collect();
            assert_eq!((lines[1].len(), lines[2].len()), (row.len(), row.len()), "{head}{row}");
            let ends = |text: &str, what: &str| text.find(what).map(|at| at + what.len()).unwrap();
            assert_eq!(ends(lines[2], "ratio"), ends(&row, "0.50"));
            assert!(ends(lines[1], " nccl ") < ends(lines[2], "ratio"));
            assert!(row.ends_with("     8.00    2.50       0    0.50        -       -       -       -"), "{row}");
        }
    }

    #[test]
    fn the_footer_is_nccl_tests_own() {
        assert_eq!(
            text(|out| footer(out, Some(0), Some(122.7309))),
            "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 122.731 \n"
        );
        assert_eq!(
            text(|out| footer(out, Some(2), None)),
            "# Out of bounds values : 2 FAILED\n# Avg bus bandwidth    : N/A \n"
        );
        assert!(text(|out| footer(out, None, None)).starts_with("# Out of bounds values : N/A (not checked)\n"));
    }

    #[test]
    fn floats_lose_decimals_before_they_burst_the_column() {
        assert_eq!(float(1234.567, 7), "1234.57");
        assert_eq!(float(12345.67, 7), "12345.7");
        assert_eq!(float(1234567.8, 7), "1234568");
        assert_eq!(float(123456789.0, 7), "1.2e+08");
        assert_eq!(float(0.0, 6), "0.00");
    }

    #[test]
    fn general_is_c_s() {
        // What printf("%g") prints.
        for (value, want) in [
            (0.0, "0"),
            (1.0, "1"),
            (50176.0, "50176"),
            (999999.0, "999999"),
            (999999.5, "1e+06"),
            (1234567.0, "1.23457e+06"),
            (0.5, "0.5"),
            (122.7309, "122.731"),
            (0.0001234567, "0.000123457"),
            (0.00001234567, "1.23457e-05"),
        ] {
            assert_eq!(general(value), want);
        }
    }
}
