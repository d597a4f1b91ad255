//! Addresses of PCI functions.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

/// Domain, bus, device and function.
///
/// NVML writes `00000000:3B:00.0`, sysfs `0000:3b:00.0`; both are read, and shown as sysfs writes it. Domains behind a
/// VMD have more than four digits there too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Address {
    pub(crate) domain: u32,
    pub(crate) bus: u8,
    pub(crate) device: u8,
    pub(crate) function: u8,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let mut parts = rest.split(':');
            let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
            let hex = |digits: &str, most: usize| {
                let all_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
                (all_hex && (1..=most).contains(&digits.len())).then(|| u32::from_str_radix(digits, 16).ok()).flatten()
            };
            let address = Address {
                domain: hex(domain, 8)?,
                bus: hex(bus, 2)? as u8,
                device: hex(device, 2)? as u8,
                function: hex(function, 1)? as u8,
            };
            let whole = parts.next().is_none() && domain.len() >= 4 && address.device < 32 && address.function < 8;
            whole.then_some(address)
        };
        parse().ok_or_else(|| format!("'{text}' is no address of a PCI function, such as 0000:3b:00.0"))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvml_s_form_and_sysfs_s_are_one_address() {
        let parse = |text: &str| text.parse::<Address>().unwrap().to_string();
        assert_eq!(parse("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(parse("0000:3b:1f.7"), "0000:3b:1f.7");
        assert_eq!(parse("10000:e1:00.0"), "10000:e1:00.0");
    }

    #[test]
    fn what_is_no_address_is_said() {
        for text in
            ["", "3b:00.0", "0000:3b:00", "0000:3b:20.0", "0000:3b:00.8", "0000:3g:00.0", "0:0:0:0.0", "pci0000:3a"]
        {
            assert!(text.parse::<Address>().unwrap_err().contains("no address"), "{text}");
        }
    }
}
