#!/usr/bin/env bash
# The tests of what the host backend computes, and of how its groups fail, with ranks that are processes. tests/processes,
# which ci/test.sh runs, has what only processes do: meet, die, and leave.
set -euo pipefail
cd "$(dirname "$0")/.."
export PEERSUM_TEST_RANKS=processes
# As a part of the workspace, for which ci/test.sh has built them.
cargo test --workspace --test host_results --test host_sequences --test host_lengths --test host_failures --test host_faults
# Ten million rounds take seconds where the two processes have a core each, and so while nothing else runs.
cargo test --workspace --test processes -- --ignored --nocapture who_sees_the_flag
