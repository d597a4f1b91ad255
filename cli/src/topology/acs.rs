//! Access Control Services of PCIe bridges: what makes a switch send the traffic between two devices below it up to the
//! root complex, so that peer-to-peer is slow, or lost in the IOMMU.

use std::fmt;

use serde::Serialize;

/// Extended capabilities begin here in the configuration space.
const FIRST_EXTENDED: usize = 0x100;
/// The whole of it; who may not see it gets 64 bytes.
const WHOLE: usize = 4096;
/// The id of the capability (PCI Express Base Specification, 7.7.11).
const ACS: u32 = 0x000d;

/// P2P Request Redirect.
const REQUEST_REDIRECT: u16 = 0x04;
/// P2P Completion Redirect.
const COMPLETION_REDIRECT: u16 = 0x08;
/// The control bits that have a name in lspci, in its order.
const NAMES: [(u16, &str); 7] = [
    (0x01, "SrcValid"),
    (0x02, "TransBlk"),
    (REQUEST_REDIRECT, "ReqRedir"),
    (COMPLETION_REDIRECT, "CmpltRedir"),
    (0x10, "UpstreamFwd"),
    (0x20, "EgressCtrl"),
    (0x40, "DirectTrans"),
];

/// What is known of a bridge's ACS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Acs {
    /// The control register.
    Control(Control),
    /// The bridge has no such capability.
    Absent,
    /// It could not be read, and why. Not "off".
    Unknown(String),
}

/// The ACS control register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Control(pub(crate) u16);

impl Control {
    /// Whether requests or completions between peers go to the root complex. Source validation and translation
    /// blocking, which a system also switches on, redirect nothing.
    pub(crate) fn redirects(self) -> bool {
        self.0 & (REQUEST_REDIRECT | COMPLETION_REDIRECT) != 0
    }

    /// Whether it has both bits that redirect.
    pub(crate) fn has_redirects(self) -> bool {
        self.0 & (REQUEST_REDIRECT | COMPLETION_REDIRECT) == REQUEST_REDIRECT | COMPLETION_REDIRECT
    }

    /// The bit that lspci calls so.
    pub(crate) fn bit(name: &str) -> Option<u16> {
        NAMES.iter().find(|(_, known)| *known == name).map(|(bit, _)| *bit)
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (bit, name)) in NAMES.into_iter().enumerate() {
            let (space, sign) = (if index == 0 { "" } else { " " }, if self.0 & bit != 0 { '+' } else { '-' });
            write!(f, "{space}{name}{sign}")?;
        }
        Ok(())
    }
}

impl Acs {
    /// From the configuration space of a bridge, or as much of it as could be read.
    pub(crate) fn of_config(config: &[u8]) -> Self {
        if config.len() < WHOLE {
            let reason = "only root (CAP_SYS_ADMIN) may read the extended configuration space";
            return Acs::Unknown(format!("{} bytes could be read: {reason}", config.len()));
        }
        let dword =
            |at: usize| config.get(at..at + 4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap_or_default()));
        let mut at = FIRST_EXTENDED;
        // Each capability has 4 bytes at least, so a longer walk goes in circles.
        for _ in 0..(WHOLE - FIRST_EXTENDED) / 4 {
            let Some(header) = dword(at) else { break };
            if header == 0 {
                return Acs::Absent;
            }
            if header == u32::MAX {
                return Acs::Unknown("the bridge doesn't answer: all bits are set".into());
            }
            if header & 0xffff == ACS {
                let Some(registers) = dword(at + 4) else { break };
                return Acs::Control(Control((registers >> 16) as u16));
            }
            match (header >> 20) as usize & !3 {
                0 => return Acs::Absent,
                next if next < FIRST_EXTENDED => break,
                next => at = next,
            }
        }
        Acs::Unknown("the list of extended capabilities is damaged".into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(capabilities: &[(usize, u32, u32)]) -> Vec<u8> {
        let mut config = vec![0; WHOLE];
        for &(at, header, registers) in capabilities {
            config[at..at + 4].copy_from_slice(&header.to_le_bytes());
            config[at + 4..at + 8].copy_from_slice(&registers.to_le_bytes());
        }
        config
    }

    fn control(bits: u32) -> Acs {
        Acs::of_config(&config(&[(0x100, 0x1481_0001, 0), (0x148, 0x0001_000d, bits << 16 | 0x5f)]))
    }

    /// Field case A13 (NVIDIA/nccl#2079): SrcValid alone redirects nothing.
    #[test]
    fn redirection_is_told_from_the_other_bits() {
        let redirects = |bits| matches!(control(bits), Acs::Control(control) if control.redirects());
        assert!(redirects(0x1d) && redirects(0x04) && redirects(0x08));
        assert!(!redirects(0x01) && !redirects(0x13) && !redirects(0));
        let shown = "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-";
        assert!(matches!(control(0x1d), Acs::Control(control) if control.to_string() == shown));
    }

    #[test]
    fn what_can_not_be_read_is_unknown_and_not_off() {
        for length in [0, 64, 256, 4095] {
            assert!(matches!(Acs::of_config(&vec![0; length]), Acs::Unknown(_)), "{length}");
        }
        assert!(matches!(Acs::of_config(&vec![0xff; WHOLE]), Acs::Unknown(_)));
        // In a circle, and into the standard header.
        assert!(matches!(Acs::of_config(&config(&[(0x100, 0x1001_0001, 0)])), Acs::Unknown(_)));
        assert!(matches!(Acs::of_config(&config(&[(0x100, 0x0401_0001, 0)])), Acs::Unknown(_)));
    }

    #[test]
    fn a_bridge_without_the_capability_has_none() {
        assert_eq!(Acs::of_config(&config(&[])), Acs::Absent);
        assert_eq!(Acs::of_config(&config(&[(0x100, 0x0001_0001, 0)])), Acs::Absent);
    }

    proptest! {
        #[test]
        fn no_bytes_break_it(bytes in prop::collection::vec(any::<u8>(), WHOLE), length in 0..=WHOLE) {
            Acs::of_config(&bytes[..length]);
        }
    }
}
