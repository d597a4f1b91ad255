//! Leaves out of what is printed what tells one machine from all others: names of hosts, addresses of the network, UUIDs.
//! A report of the doctor's is pasted where everybody reads it.

use std::net::IpAddr;

/// A warning, with each host called by its number in the log, and no address.
pub(super) fn of_warning(text: &str, hosts: &[String]) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(is_part) {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        out.push_str(&of_word(&rest[..end], hosts));
        rest = &rest[end..];
    }
    out + rest
}

fn of_word(word: &str, hosts: &[String]) -> String {
    // A sentence may end behind it, and a colon or a port follow.
    let bare = word.trim_end_matches(['.', ':']);
    let tail = &word[bare.len()..];
    if bare.parse::<IpAddr>().is_ok() {
        return format!("(address){tail}");
    }
    let (name, port) = bare.split_once(':').unwrap_or((bare, ""));
    let port = if port.is_empty() { String::new() } else { format!(":{port}") };
    if name.parse::<IpAddr>().is_ok() {
        return format!("(address){port}{tail}");
    }
    let is = |host: &String| name == host || name.strip_prefix(host.as_str()).is_some_and(|rest| rest.starts_with('.'));
    match hosts.iter().position(is) {
        Some(index) => format!("host{index}{port}{tail}"),
        None => of_device(word),
    }
}

/// An entry of CUDA_VISIBLE_DEVICES, or a word, without its UUID.
pub(super) fn of_device(entry: &str) -> String {
    match ["MIG-", "GPU-"].into_iter().find(|kind| entry.starts_with(kind) && entry.len() > kind.len()) {
        Some(kind) => format!("{kind}(UUID)"),
        None => entry.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_addresses_are_left_out_and_the_rest_stays() {
        let hosts = ["node-7".to_owned(), "a".to_owned()];
        for (text, shown) in [
            (
                "Connect to 10.0.12.7<36913> failed : Connection refused",
                "Connect to (address)<36913> failed : Connection refused",
            ),
            ("peer fe80::9e63:1, GID ::ffff:10.0.0.1 lost.", "peer (address), GID (address) lost."),
            (
                "Net: 192.168.1.5:4000 and node-7:99 and node-7.cluster.example.",
                "Net: (address):4000 and host0:99 and host0.",
            ),
            (
                "socketStartConnect: a call at a: std::vector 2.27.3",
                "socketStartConnect: host1 call at host1: std::vector 2.27.3",
            ),
            ("device GPU-af7b61d8-0000 is gone", "device GPU-(UUID) is gone"),
            ("misc/socket.cc:484 cuda 13.0", "misc/socket.cc:484 cuda 13.0"),
            ("", ""),
        ] {
            assert_eq!(of_warning(text, &hosts), shown);
        }
        assert_eq!((of_device("MIG-GPU-af7b61d8/1/0"), of_device("3")), ("MIG-(UUID)".into(), "3".into()));
        assert_eq!(of_device("GPU-"), "GPU-");
    }
}
