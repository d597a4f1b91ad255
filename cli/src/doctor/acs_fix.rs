//! Writes a script that clears ACS redirection at certain bridges, and a unit of systemd's that runs it at each start.
//! Nothing is applied here.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use super::p2p::Redirected;

const SCRIPT: &str = "peersum-acs-redirect-off.sh";
const UNIT: &str = "peersum-acs-redirect-off.service";

/// Writes both, and says what to do with them. Files that are there are not replaced.
pub(super) fn write(folder: &Path, redirected: &Redirected) -> Result<String> {
    // What could not be read may redirect: the script looks, as root.
    let bridges: Vec<_> =
        redirected.bridges.keys().chain(redirected.unreadable.keys()).map(ToString::to_string).collect();
    ensure!(
        !bridges.is_empty(),
        "there is nothing to write to {}: no bridge between GPUs, or between a GPU and the NICs beside it, redirects",
        folder.display()
    );
    fs::create_dir_all(folder).with_context(|| format!("can't make the folder {}", folder.display()))?;
    let script = create(&folder.join(SCRIPT), 0o755, &script(&bridges))?;
    let unit = create(&folder.join(UNIT), 0o644, &unit())?;
    let first = &bridges[0];
    Ok(format!(
        "Written, and nothing applied:\n  {}\n  {}\n\n\
         Read them. If no virtual machine has devices of this machine:\n\n  \
         sudo install -m 755 {} /usr/local/sbin/\n  \
         sudo install -m 644 {} /etc/systemd/system/\n  \
         sudo systemctl daemon-reload && sudo systemctl enable --now {UNIT}\n\n\
         Check it now, and again after a restart:\n\n  \
         sudo lspci -vvv -s {first} | grep ACSCtl   # ReqRedir- CmpltRedir-\n  \
         sudo peersum doctor                        # acs-redirect is gone\n\n\
         Undo it with `sudo systemctl disable {UNIT}` and a restart: the firmware sets the bridges anew.\n",
        script.display(),
        unit.display(),
        script.display(),
        unit.display(),
    ))
}

fn create(path: &Path, mode: u32, text: &str) -> Result<PathBuf> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .with_context(|| format!("can't write {} (an older one is not replaced)", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("can't write {}", path.display()))?;
    Ok(path.to_owned())
}

/// Clears Request Redirect, Completion Redirect and Upstream Forwarding (bits 2, 3 and 4), and leaves the others.
fn script(bridges: &[String]) -> String {
    format!(
        r#"#!/bin/sh
# Clears ACS redirection of peer-to-peer traffic at the PCIe bridges between this machine's GPUs, and between GPUs and the
# NICs beside them. Written by `peersum doctor --write-acs-fix`; needs root and setpci (pciutils).
# ACS isolates virtual machines that have devices from each other: don't run this where there are such.
set -u
bridges="{}"
failed=0
for bridge in $bridges; do
    if ! before=$(setpci -s "$bridge" ECAP_ACS+0x6.w 2>/dev/null); then
        echo "$bridge: no ACS, or not there: left as it is"
        continue
    fi
    # Value:mask: only these three bits are written.
    if setpci -s "$bridge" ECAP_ACS+0x6.w=0000:001c && after=$(setpci -s "$bridge" ECAP_ACS+0x6.w); then
        echo "$bridge: ACS control $before -> $after"
    else
        echo "$bridge: could not be written" >&2
        failed=1
    fi
done
exit $failed
"#,
        bridges.join(" ")
    )
}

fn unit() -> String {
    format!(
        "[Unit]\n\
         Description=Clear ACS redirection between GPUs\n\
         After=systemd-modules-load.service\n\
         Before=docker.service containerd.service kubelet.service slurmd.service\n\
         \n\
         [Service]\n\
         Type=oneshot\n\
         RemainAfterExit=yes\n\
         ExecStart=/usr/local/sbin/{SCRIPT}\n\
         \n\
         [Install]\n\
         WantedBy=multi-user.target\n"
    )
}
