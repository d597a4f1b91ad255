//! Reads what `lspci -vvv` prints: the ACS of bridges, where the configuration space can't be read from here.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::{
    acs::{Acs, Control},
    address::Address,
    machine::Machine,
};

/// The ACS of each function that the text has.
pub(crate) fn parse(text: &str) -> BTreeMap<Address, Acs> {
    let mut found = BTreeMap::new();
    let mut at: Option<(Address, State)> = None;
    for line in text.lines() {
        if let Some(address) = head(line) {
            settle(&mut found, at.replace((address, State::default())));
        } else if let Some((_, state)) = &mut at {
            state.line(line.trim());
        }
    }
    settle(&mut found, at);
    found
}

/// What is known of a function so far.
#[derive(Default)]
struct State {
    control: Option<Result<Control, String>>,
    /// There is a capability of PCI Express beyond the first 256 bytes, so these could be read.
    extended: bool,
    denied: bool,
}

impl State {
    fn line(&mut self, line: &str) {
        if let Some(control) = line.strip_prefix("ACSCtl:") {
            self.control = Some(control_of(control));
        } else if line.starts_with("Capabilities: [") {
            // Standard ones stand below 100 (hexadecimal).
            let place = line["Capabilities: [".len()..].split([']', ' ']).next().unwrap_or("");
            self.extended |= place.len() >= 3 && u32::from_str_radix(place, 16).is_ok();
        }
        self.denied |= line.contains("<access denied>") || line.contains("Access denied");
    }
}

fn settle(found: &mut BTreeMap<Address, Acs>, at: Option<(Address, State)>) {
    let Some((address, state)) = at else { return };
    let acs = match state.control {
        _ if state.denied => Acs::Unknown("lspci was not run as root: access denied".into()),
        Some(Ok(control)) => Acs::Control(control),
        Some(Err(why)) => Acs::Unknown(why),
        None if state.extended => Acs::Absent,
        None => Acs::Unknown("lspci shows no extended capability of it: run it as root, with -vvv".into()),
    };
    found.insert(address, acs);
}

/// `0000:3b:00.0 PCI bridge: ...`, or without the domain, at the beginning of a line.
fn head(line: &str) -> Option<Address> {
    let word = line.split(' ').next().filter(|word| !word.is_empty())?;
    let whole = if word.matches(':').count() == 1 { format!("0000:{word}") } else { word.to_owned() };
    whole.parse().ok()
}

/// `SrcValid+ TransBlk- ...`
fn control_of(text: &str) -> Result<Control, String> {
    let mut bits = 0;
    let mut seen = 0;
    for word in text.split_whitespace() {
        let Some((name, set)) =
            word.strip_suffix('+').map(|name| (name, true)).or(word.strip_suffix('-').map(|name| (name, false)))
        else {
            return Err(format!("ACSCtl has '{word}', which is neither on nor off"));
        };
        if let Some(bit) = Control::bit(name) {
            seen |= bit;
            bits |= if set { bit } else { 0 };
        }
    }
    // Both are needed to say that nothing is redirected.
    if !Control(seen).has_redirects() {
        return Err("ACSCtl doesn't have ReqRedir and CmpltRedir: the line is cut off".into());
    }
    Ok(Control(bits))
}

/// Takes over the ACS of bridges that are unknown. It is an error if the text has none of the machine's bridges.
pub(crate) fn fill(machine: &mut Machine, text: &str) -> Result<()> {
    let found = parse(text);
    ensure!(!found.is_empty(), "there is no device in it: it must be what `lspci -vvv` prints");
    let mut known = false;
    for (address, function) in machine.functions.iter_mut().filter(|(_, function)| function.is_bridge()) {
        let Some(acs) = found.get(address) else { continue };
        known = true;
        if !matches!(function.acs, Some(Acs::Control(_) | Acs::Absent)) {
            function.acs = Some(acs.clone());
        }
    }
    ensure!(known, "none of the bridges in it is one of this machine's");
    machine.sources.push("lspci".into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Made in lspci's format. Bridges: redirects, source validation alone, none, no ACS, not readable, cut off.
    const TEXT: &str = "\
00:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Starship/Matisse GPP Bridge (prog-if 00 [Normal decode])
\tBus: primary=00, secondary=01, subordinate=01, sec-latency=0
\tCapabilities: [58] Express (v2) Root Port (Slot+), MSI 00
\tCapabilities: [100 v1] Vendor Specific Information: ID=0001 Rev=1 Len=010 <?>
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-

00:03.1 PCI bridge: Somebody's bridge
\tCapabilities: [100 v2] Advanced Error Reporting
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-

0000:40:01.1 PCI bridge: Somebody's bridge
\tCapabilities: [100 v2] Advanced Error Reporting
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-

80:01.1 PCI bridge: Somebody's bridge
\tCapabilities: [100 v2] Advanced Error Reporting

81:00.0 PCI bridge: Somebody's bridge
\tCapabilities: <access denied>

c0:01.1 PCI bridge: Somebody's bridge
\tCapabilities: [100 v2] Advanced Error Reporting
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRe
";

    fn acs(address: &str) -> Acs {
        parse(TEXT)[&address.parse().unwrap()].clone()
    }

    /// Field case A13 (NVIDIA/nccl#2079, #606).
    #[test]
    fn bridges_are_told_apart() {
        let redirects = |address: &str| match acs(address) {
            Acs::Control(control) => control.redirects(),
            other => panic!("{address}: {other:?}"),
        };
        assert!(redirects("0000:00:01.1"));
        assert!(!redirects("0000:00:03.1") && !redirects("0000:40:01.1"));
        assert_eq!(acs("0000:80:01.1"), Acs::Absent);
        for unknown in ["0000:81:00.0", "0000:c0:01.1"] {
            assert!(matches!(acs(unknown), Acs::Unknown(_)), "{unknown}");
        }
        assert_eq!(parse(TEXT).len(), 6);
    }

    #[test]
    fn what_shows_no_extended_capability_is_unknown_and_not_off() {
        // -v, or not as root: standard capabilities alone.
        let text = "00:01.1 PCI bridge: X\n\tCapabilities: [58] Express (v2) Root Port\n";
        assert!(matches!(parse(text).values().next(), Some(Acs::Unknown(_))));
    }

    proptest! {
        /// Whatever is cut out, no bridge that redirects becomes one that has none by accident of the cut line.
        #[test]
        fn a_cut_line_is_no_clean_bridge(cut in 0..200usize) {
            let end = TEXT.find("UpstreamFwd+ EgressCtrl- DirectTrans-\n").unwrap();
            let text = &TEXT[..end.saturating_sub(cut)];
            if let Some(Acs::Control(control)) = parse(text).values().next() {
                prop_assert!(control.redirects(), "{}", text);
            }
        }

        #[test]
        fn no_text_breaks_it(text in "(00:01\\.1 |0000:ff:1f\\.7 |ACSCtl:|SrcValid[+-] |ReqRedir[+-] |CmpltRedir[+-] |Capabilities: \\[|100 v1\\]|<access denied>|\t|\n|\\PC){0,50}") {
            parse(&text);
        }
    }
}
