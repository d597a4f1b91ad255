//! What the machine code of every all-reduce kernel must have, whatever the compiler made of the source.

use std::collections::BTreeSet;

use peersum::Algorithm;

use super::listing::{Function, Instruction};

/// What a kernel's name says: peersum_<algorithm>_<type>_<reduction>_<world>.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kernel {
    pub(crate) algorithm: Algorithm,
    pub(crate) dtype: String,
    pub(crate) reduction: String,
    pub(crate) world: usize,
}

impl Kernel {
    pub(crate) fn of(name: &str) -> Option<Kernel> {
        let rest = name.strip_prefix("peersum_")?;
        // Of "one_shot" and "one_shot_pull" the longer is meant.
        let (algorithm, rest) = Algorithm::ALL
            .into_iter()
            .filter_map(|algorithm| {
                Some((algorithm, rest.strip_prefix(&algorithm.name().replace('-', "_"))?.strip_prefix('_')?))
            })
            .min_by_key(|(_, rest)| rest.len())?;
        let mut parts = rest.split('_');
        let kernel = Kernel {
            algorithm,
            dtype: parts.next()?.to_owned(),
            reduction: parts.next()?.to_owned(),
            world: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(kernel)
    }
}

/// What of the contract this function breaks.
pub(crate) fn violations(function: &Function, kernel: &Kernel) -> Vec<String> {
    let mut broken = payload(function, kernel);
    broken.extend(flags(function));
    broken.extend(addressing(function));
    broken
}

/// Payload moves 16 bytes at a time, and a rank has the loads of all peers before it.
fn payload(function: &Function, kernel: &Kernel) -> Vec<String> {
    let peers = kernel.world - 1;
    let count = |body: &[Instruction], base: &str| {
        body.iter().filter(|instruction| instruction.base() == base && is_wide(instruction)).count()
    };
    let hot: Vec<_> = function
        .innermost_loops()
        .into_iter()
        .filter(|body| count(body, "LDG") > 0 && count(body, "STG") > 0)
        .collect();
    let most = |base| hot.iter().map(|body| count(body, base)).max().unwrap_or(0);
    let mut broken = Vec::new();
    // One-shot stages and reduces; two-shot scatters, reduces and gathers.
    let needed = 1 + kernel.algorithm.rounds() as usize;
    if hot.len() < needed {
        broken.push(format!("{} loops load and store 16 bytes at a time, {needed} must", hot.len()));
    }
    if most("LDG") < peers {
        broken.push(format!("no loop loads from all {peers} peers 16 bytes at a time"));
    }
    if kernel.algorithm == Algorithm::OneShot && most("STG") < peers {
        broken.push(format!("no loop stores to all {peers} peers 16 bytes at a time"));
    }
    if hot.iter().any(|body| body.iter().any(|instruction| instruction.base() == "MEMBAR")) {
        broken.push("a loop over payload has a fence".into());
    }
    broken
}

/// Flags are stored and polled at system scope; what was written before is fenced, and what is read after too.
fn flags(function: &Function) -> Vec<String> {
    let mut broken = Vec::new();
    let is_flag = |instruction: &Instruction, base: &str| {
        instruction.base() == base && instruction.has("64") && instruction.has("STRONG") && instruction.has("SYS")
    };
    // Of the memory operations alone, since the others may stand anywhere.
    let memory: Vec<_> = function.instructions.iter().filter(|instruction| touches_memory(instruction)).collect();
    let releases: Vec<_> = (0..memory.len()).filter(|&index| is_flag(memory[index], "STG")).collect();
    if releases.is_empty() {
        broken.push("no flag is stored at system scope".into());
    }
    if releases.iter().any(|&index| index == 0 || !is_system_fence(memory[index - 1])) {
        broken.push("a flag is stored without a system fence right before it".into());
    }
    if !function.loops().iter().any(|body| body.iter().any(|instruction| is_flag(instruction, "LDG"))) {
        broken.push("no loop polls a flag at system scope".into());
    }
    let poll = memory.iter().position(|instruction| is_flag(instruction, "LDG")).unwrap_or(memory.len());
    let acquires = |pair: &[&Instruction]| is_system_fence(pair[0]) && pair[1].opcode.starts_with("CCTL.IVALL");
    if !memory[poll..].windows(2).any(acquires) {
        broken.push("no system fence that drops the L1 cache follows the poll".into());
    }
    broken
}

/// Accesses go to global memory and past the caches that aren't coherent.
fn addressing(function: &Function) -> Vec<String> {
    let any = |predicate: &dyn Fn(&Instruction) -> bool| {
        function.instructions.iter().find(|instruction| predicate(instruction)).map(|found| found.opcode.clone())
    };
    let mut broken = Vec::new();
    if let Some(opcode) = any(&|instruction| matches!(instruction.base(), "LD" | "ST" | "ATOM")) {
        broken.push(format!("{opcode} goes to a generic address"));
    }
    if let Some(opcode) = any(&|instruction| instruction.base() == "LDG" && instruction.has("CONSTANT")) {
        broken.push(format!("{opcode} may read what a peer has overwritten since"));
    }
    let narrow = |instruction: &Instruction| {
        matches!(instruction.base(), "LDG" | "STG") && instruction.has("STRONG") && !instruction.has("SYS")
    };
    if let Some(opcode) = any(&narrow) {
        broken.push(format!("{opcode} is not of system scope"));
    }
    if let Some(opcode) = any(&is_local) {
        broken.push(format!("{opcode} uses local memory"));
    }
    broken
}

/// The kernels that must be there and are not.
pub(crate) fn missing(present: &BTreeSet<Kernel>, dtypes: &[impl AsRef<str>]) -> Vec<String> {
    let reductions: BTreeSet<_> = present.iter().map(|kernel| kernel.reduction.clone()).collect();
    let mut missing = Vec::new();
    for algorithm in Algorithm::ALL {
        for dtype in dtypes {
            for reduction in &reductions {
                for world in 2..=8 {
                    let kernel =
                        Kernel { algorithm, dtype: dtype.as_ref().into(), reduction: reduction.clone(), world };
                    if !present.contains(&kernel) {
                        missing.push(format!("{kernel:?}"));
                    }
                }
            }
        }
    }
    missing
}

fn is_wide(instruction: &Instruction) -> bool {
    instruction.has("128") || instruction.has("256")
}

fn is_local(instruction: &Instruction) -> bool {
    matches!(instruction.base(), "LDL" | "STL")
}

fn is_system_fence(instruction: &Instruction) -> bool {
    instruction.base() == "MEMBAR" && instruction.has("SYS")
}

fn touches_memory(instruction: &Instruction) -> bool {
    let base = instruction.base();
    ["LDG", "STG", "LDL", "STL", "LDS", "STS", "ATOM", "RED", "MEMBAR", "CCTL", "BAR"].iter().any(|name| {
        // ATOMG and ATOMS too.
        base == *name || (*name == "ATOM" && base.starts_with(name))
    }) || matches!(base, "LD" | "ST")
}

#[cfg(test)]
mod tests {
    use super::{super::listing::functions, *};

    /// The shape of a good one-shot kernel for two ranks.
    const GOOD: [&str; 19] = [
        "LDG.E.128 R4, desc[UR4][R4.64]",
        "STG.E.128 desc[UR4][R24.64], R4",
        "@!P0 BRA 0x0",
        "BAR.SYNC.DEFER_BLOCKING 0x0",
        "MEMBAR.ALL.SYS",
        "ERRBAR",
        "STG.E.64.STRONG.SYS desc[UR4][R6.64], R10",
        "LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]",
        "@P0 BRA 0x70",
        "MEMBAR.ALL.SYS",
        "ERRBAR",
        "CCTL.IVALL",
        "BAR.SYNC.DEFER_BLOCKING 0x0",
        "LDG.E.128 R4, desc[UR4][R4.64]",
        "LDG.E.128 R8, desc[UR4][R8.64]",
        "STG.E.128 desc[UR4][R24.64], R4",
        "@!P0 BRA 0xd0",
        "EXIT",
        "BRA 0x120",
    ];

    fn broken(name: &str, code: &[&str]) -> Vec<String> {
        let mut listing = format!("code for sm_90\nFunction : {name}\n");
        for (index, line) in code.iter().enumerate() {
            listing += &format!("/*{:04x}*/ {line} ; /* 0x0 */\n", index * 16);
        }
        violations(&functions(&listing)[0], &Kernel::of(name).unwrap())
    }

    /// What breaks when the instruction at `index` is another.
    fn with(index: usize, instruction: &'static str) -> Vec<String> {
        let mut code = GOOD;
        code[index] = instruction;
        broken("peersum_one_shot_f32_sum_2", &code)
    }

    fn only(broken: &[String], part: &str) {
        assert!(broken.len() == 1 && broken[0].contains(part), "expected '{part}', got {broken:?}");
    }

    #[test]
    fn a_good_kernel_passes() {
        assert_eq!(broken("peersum_one_shot_f32_sum_2", &GOOD), Vec::<String>::new());
    }

    #[test]
    fn narrow_payload_is_found() {
        only(&with(0, "LDG.E.64 R4, desc[UR4][R4.64]"), "1 loops load and store 16 bytes at a time, 2 must");
        only(&with(1, "STG.E desc[UR4][R4.64], R4"), "1 loops load and store 16 bytes at a time, 2 must");
        let three = broken("peersum_one_shot_pull_f32_sum_4", &GOOD);
        only(&three, "no loop loads from all 3 peers");
        let push = broken("peersum_one_shot_f32_sum_3", &GOOD);
        only(&push, "no loop stores to all 2 peers");
        let two_shot = broken("peersum_two_shot_f32_sum_2", &GOOD);
        only(&two_shot, "2 loops load and store 16 bytes at a time, 3 must");
    }

    #[test]
    fn a_weak_or_narrow_flag_is_found() {
        only(&with(6, "STG.E.64 desc[UR4][R6.64], R10"), "no flag is stored at system scope");
        only(&with(4, "NOP"), "without a system fence");
        only(&with(4, "MEMBAR.SC.GPU"), "without a system fence");
        assert!(with(7, "LDG.E.64 R10, desc[UR4][R12.64]").iter().any(|text| text.contains("no loop polls")));
        assert!(with(7, "LDG.E.64.STRONG.GPU R10, [R12.64]").iter().any(|text| text.contains("not of system scope")));
        only(&with(11, "NOP"), "follows the poll");
        only(&with(9, "MEMBAR.ALL.GPU"), "follows the poll");
    }

    #[test]
    fn other_paths_to_memory_are_found() {
        only(&with(13, "LDG.E.128.CONSTANT R4, desc[UR4][R4.64]"), "may read what a peer has overwritten");
        only(&with(3, "LD.E R4, desc[UR4][R4.64]"), "generic address");
        only(&with(17, "STL [R1], R0"), "uses local memory");
    }

    #[test]
    fn a_fence_among_payload_is_found() {
        only(&with(14, "MEMBAR.ALL.SYS"), "has a fence");
    }

    #[test]
    fn names_are_read() {
        let kernel = Kernel::of("peersum_two_shot_pull_bf16_sum_8").unwrap();
        assert_eq!((kernel.algorithm, &*kernel.dtype, kernel.world), (Algorithm::TwoShotPull, "bf16", 8));
        assert_eq!(Kernel::of("peersum_one_shot_f32_sum_2").unwrap().algorithm, Algorithm::OneShot);
        assert_eq!(Kernel::of("peersum_spin"), None);
    }

    #[test]
    fn a_missing_kernel_is_found() {
        let all = |reductions: &[&str]| -> BTreeSet<_> {
            let mut kernels = BTreeSet::new();
            for reduction in reductions {
                for algorithm in Algorithm::ALL {
                    for world in 2..=8 {
                        kernels.insert(Kernel {
                            algorithm,
                            dtype: "f32".into(),
                            reduction: (*reduction).into(),
                            world,
                        });
                    }
                }
            }
            kernels
        };
        let mut kernels = all(&["sum", "max"]);
        assert_eq!(missing(&kernels, &["f32"]), Vec::<String>::new());
        assert_eq!(missing(&kernels, &["f32", "f16"]).len(), 2 * 4 * 7);
        kernels.pop_first();
        assert_eq!(missing(&kernels, &["f32"]).len(), 1);
    }
}
