#!/usr/bin/env bash
# No dependency of the library or the command needs a newer Rust than they say that they need. That their own code doesn't
# is clippy's to check (incompatible_msrv).
set -euo pipefail
cd "$(dirname "$0")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
cargo metadata --format-version 1 --locked --all-features --filter-platform "$host" | python3 -c '
import json, sys

metadata = json.load(sys.stdin)
packages = {package["id"]: package for package in metadata["packages"]}
nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
version = lambda text: tuple(int(part) for part in (text.split(".") + ["0", "0"])[:3])

ours = [id for id in metadata["workspace_members"] if packages[id]["name"] in ("peersum", "peersum-cli")]
promised = min(packages[id]["rust_version"] for id in ours)
seen, todo = set(), list(ours)
while todo:
    id = todo.pop()
    if id in seen:
        continue
    seen.add(id)
    # Dependencies of tests and benches bind nobody else.
    todo += [dep["pkg"] for dep in nodes[id]["deps"] if any(kind["kind"] != "dev" for kind in dep["dep_kinds"])]
newer = [packages[id] for id in seen if version(packages[id]["rust_version"] or "0") > version(promised)]
for package in newer:
    print("{name} {version} needs Rust {rust_version}".format(**package), file=sys.stderr)
print(f"{len(seen)} packages, {len(newer)} of them need a newer Rust than {promised}")
sys.exit(bool(newer))
'
