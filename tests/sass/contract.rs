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

    fn peers(&self) -> usize {
        self.world - 1
    }

    /// Rounds of a chunk that go by packets.
    fn packet_rounds(&self) -> usize {
        match self.algorithm.name() {
            "two-shot-ll" => 2,
            "one-shot-ll" | "two-shot-ll-pull" => 1,
            _ => 0,
        }
    }

    /// Rounds of a chunk that go by flags.
    fn flag_rounds(&self) -> usize {
        self.algorithm.rounds() as usize - self.packet_rounds()
    }
}

/// What of the contract this function breaks.
pub(crate) fn violations(function: &Function, kernel: &Kernel) -> Vec<String> {
    let mut broken = if kernel.flag_rounds() > 0 { payload(function, kernel) } else { Vec::new() };
    broken.extend(packets(function, kernel));
    broken.extend(flags(function, kernel));
    broken.extend(addressing(function, kernel));
    broken.extend(beginning(function));
    broken
}

/// Payload that flags announce moves 16 bytes at a time, and a rank has the loads of all peers before it.
fn payload(function: &Function, kernel: &Kernel) -> Vec<String> {
    let peers = kernel.peers();
    let count =
        |body: &[Instruction], base: &str| body.iter().filter(|one| one.base() == base && is_plain_wide(one)).count();
    let hot: Vec<_> = function
        .innermost_loops()
        .into_iter()
        .filter(|body| count(body, "LDG") > 0 && count(body, "STG") > 0)
        .collect();
    let most = |base| hot.iter().map(|body| count(body, base)).max().unwrap_or(0);
    let mut broken = Vec::new();
    // One-shot stages and reduces; two-shot scatters, reduces and gathers. Where packets come first, it gathers alone.
    let needed = if kernel.packet_rounds() == 0 { 1 + kernel.flag_rounds() } else { kernel.flag_rounds() };
    if hot.len() < needed {
        broken.push(format!("{} loops load and store 16 bytes at a time, {needed} must", hot.len()));
    }
    if kernel.packet_rounds() == 0 && most("LDG") < peers {
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

/// A packet is stored and polled by one access of system scope: in two it could come torn.
fn packets(function: &Function, kernel: &Kernel) -> Vec<String> {
    let mut broken = Vec::new();
    let is_packet = |instruction: &Instruction, base: &str| {
        instruction.base() == base && instruction.has("128") && is_system_strong(instruction)
    };
    let rounds = kernel.packet_rounds();
    if rounds == 0 {
        if function.instructions.iter().any(|one| is_packet(one, "LDG") || is_packet(one, "STG")) {
            broken.push("it moves packets, and is a kernel of flags alone".into());
        }
        return broken;
    }
    if kernel.flag_rounds() == 0 {
        // Tensors are moved word by word here, so whatever is wide is a packet.
        if let Some(plain) = function.instructions.iter().find(|one| is_wide(one) && !is_system_strong(one)) {
            broken.push(format!("{} moves a packet without being strong at system scope", plain.opcode));
        }
    }
    let peers = kernel.peers();
    let polls = function.smallest_loops_with(|one| is_packet(one, "LDG"));
    let stores = function.smallest_loops_with(|one| is_packet(one, "STG"));
    let most = |loops: &[&[Instruction]], base: &str| {
        loops.iter().map(|body| body.iter().filter(|one| is_packet(one, base)).count()).max().unwrap_or(0)
    };
    if polls.len() < rounds {
        broken.push(format!("{} loops poll packets by one access, {rounds} must", polls.len()));
    }
    if most(&polls, "LDG") < peers {
        broken.push(format!("no loop polls packets of all {peers} peers"));
    }
    // Who gathers by flags sends each packet to one peer alone.
    let receivers = if kernel.flag_rounds() == 0 { peers } else { 1 };
    if most(&stores, "STG") < receivers {
        broken.push(format!("no loop stores packets for {receivers} peers by one access each"));
    }
    broken
}

/// Flags go at system scope. What announces payload is fenced before, by nothing else is there a fence, and a poll of it
/// drops the L1 cache. Who gives up may do more: that is what comes behind the claim.
fn flags(function: &Function, kernel: &Kernel) -> Vec<String> {
    let mut broken = Vec::new();
    let is_flag = |instruction: &Instruction, base: &str| {
        instruction.base() == base && instruction.has("64") && is_system_strong(instruction)
    };
    let unclaimed = match function.reachable_without(is_claim) {
        Ok(reached) => reached,
        Err(unknown) => return vec![unknown],
    };
    let reached = function.instructions.iter().zip(unclaimed).filter(|(_, unclaimed)| *unclaimed);
    // Of the memory operations alone, since the others may stand anywhere.
    let memory: Vec<_> = reached.map(|(one, _)| one).filter(|instruction| touches_memory(instruction)).collect();
    let follows = |index: usize, is: &dyn Fn(&Instruction) -> bool| memory.get(index + 1).is_some_and(|next| is(next));
    let places = |is: &dyn Fn(&Instruction) -> bool| -> Vec<usize> {
        (0..memory.len()).filter(|&index| is(memory[index])).collect()
    };

    let rounds = kernel.flag_rounds();
    let fences = places(&|one| one.base() == "MEMBAR");
    let (releases, others): (Vec<usize>, Vec<usize>) = fences
        .into_iter()
        .partition(|&fence| is_system_fence(memory[fence]) && follows(fence, &|next| is_flag(next, "STG")));
    if !others.is_empty() {
        broken.push("a fence that releases no flag, outside of giving up".into());
    }
    if rounds == 0 && !releases.is_empty() {
        broken.push("a fence in a kernel of packets".into());
    }
    if releases.len() < rounds {
        broken.push(format!("{} flags are released at system scope, {rounds} must", releases.len()));
    }
    // Packets are announced by flags without a fence: by one thread a peer, or where the code is unrolled by one for all.
    // More of them would be the halves of packets.
    let stores = places(&|one| is_flag(one, "STG"));
    let announced = stores.len() - releases.len();
    let announcements = match kernel.packet_rounds() {
        0 => 0,
        rounds => 1 + (rounds - 1) * kernel.peers(),
    };
    if announced > announcements {
        broken.push(format!("{announced} flags are stored without a system fence right before, {announcements} may"));
    }

    let loads = places(&|one| is_flag(one, "LDG"));
    let (acquires, looks): (Vec<usize>, Vec<usize>) =
        loads.into_iter().partition(|&load| follows(load, &|next| next.opcode == "CCTL.IVALL"));
    let loops = function.loops();
    let polls = |load: &&usize| loops.iter().any(|body| body.iter().any(|one| std::ptr::eq(one, memory[**load])));
    let polled = acquires.iter().filter(polls).count();
    if polled < rounds {
        broken.push(format!("{polled} flags are polled by loads that acquire, {rounds} must"));
    }
    // A look up from a poll, at the peer's flag and at the one in the other region, and in a poll of packets the watch for
    // the peer's call.
    let relaxed = 2 * rounds + 3 * kernel.packet_rounds();
    if looks.len() > relaxed {
        broken.push(format!("{} flags are loaded without acquiring, {relaxed} may", looks.len()));
    }
    broken
}

/// Accesses go to global memory, past the caches that aren't coherent, and at system scope if at any.
fn addressing(function: &Function, kernel: &Kernel) -> Vec<String> {
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
    let is_narrow = |instruction: &&Instruction| {
        matches!(instruction.base(), "LDG" | "STG") && instruction.has("STRONG") && !instruction.has("SYS")
    };
    // But this rank's own epoch, that of flags and that of packets, which comes from L2: at the start, and in a look up
    // from a poll that of the other region.
    let (epochs, narrow): (Vec<_>, Vec<_>) =
        function.instructions.iter().filter(is_narrow).partition(|one| one.opcode == "LDG.E.STRONG.GPU");
    let regions = usize::from(kernel.flag_rounds() > 0) + usize::from(kernel.packet_rounds() > 0);
    let own = regions + kernel.flag_rounds() + kernel.packet_rounds();
    if let Some(instruction) = narrow.first().or(epochs.get(own)) {
        broken.push(format!("{} is not of system scope", instruction.opcode));
    }
    if let Some(opcode) = any(&|one| matches!(one.base(), "RED" | "REDG") || one.base() == "ATOMG" && !is_claim(one)) {
        broken.push(format!("{opcode} is not the claim, the one atomic that is needed"));
    }
    if let Some(opcode) = any(&is_local) {
        broken.push(format!("{opcode} uses local memory"));
    }
    broken
}

/// Where kernels overlap, none touches memory, or lets the next one come, before it has waited for the last.
fn beginning(function: &Function) -> Vec<String> {
    let number = function.architecture.trim_start_matches("sm_").parse::<u32>().unwrap_or(0);
    if number < 90 {
        return Vec::new();
    }
    let before = match function.reachable_without(|instruction| instruction.base() == "ACQBULK") {
        Ok(reached) => reached,
        Err(unknown) => return vec![unknown],
    };
    let early = |instruction: &Instruction| {
        instruction.base() == "PREEXIT" || is_local(instruction) || touches_global(instruction)
    };
    let found = function.instructions.iter().zip(before).find(|(instruction, before)| *before && early(instruction));
    found.map(|(one, _)| format!("{} comes before the wait for the last kernel", one.opcode)).into_iter().collect()
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

/// Wide and ordered by the flags around it alone.
fn is_plain_wide(instruction: &Instruction) -> bool {
    is_wide(instruction) && !instruction.has("STRONG")
}

fn is_system_strong(instruction: &Instruction) -> bool {
    instruction.has("STRONG") && instruction.has("SYS")
}

/// Who gives up claims the record first.
fn is_claim(instruction: &Instruction) -> bool {
    instruction.opcode == "ATOMG.E.CAS.STRONG.GPU"
}

fn is_local(instruction: &Instruction) -> bool {
    matches!(instruction.base(), "LDL" | "STL")
}

fn is_system_fence(instruction: &Instruction) -> bool {
    instruction.base() == "MEMBAR" && instruction.has("SYS")
}

fn touches_global(instruction: &Instruction) -> bool {
    matches!(instruction.base(), "LD" | "ST" | "LDG" | "STG" | "ATOM" | "ATOMG" | "RED" | "REDG")
}

fn touches_memory(instruction: &Instruction) -> bool {
    touches_global(instruction)
        || is_local(instruction)
        || matches!(instruction.base(), "LDS" | "STS" | "ATOMS" | "MEMBAR" | "CCTL" | "BAR")
}

#[cfg(test)]
mod tests {
    use super::{super::listing::functions, *};

    /// The shape of a good one-shot kernel for two ranks.
    const FLAGS: [&str; 24] = [
        "ACQBULK",
        "LDG.E.STRONG.GPU R0, desc[UR4][R2.64]", // its own epoch
        "LDG.E.128 R4, desc[UR4][R4.64]",        // stages
        "STG.E.128 desc[UR4][R24.64], R4",
        "@!P0 BRA 0x20",
        "BAR.SYNC.DEFER_BLOCKING 0x0", // releases
        "MEMBAR.ALL.SYS",
        "ERRBAR",
        "STG.E.64.STRONG.SYS desc[UR4][R6.64], R10",
        "LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]", // polls
        "CCTL.IVALL",
        "@P1 BRA 0x110",
        "@P2 BRA 0x90",
        "ATOMG.E.CAS.STRONG.GPU PT, R14, [R12+0x4], R14, R15", // gives up
        "MEMBAR.ALL.SYS",
        "CCTL.IVALL",
        "STG.E.STRONG.SYS desc[UR4][R16.64], R0",
        "BAR.RED.AND.DEFER_BLOCKING 0x0, P0",
        "LDG.E.128 R4, desc[UR4][R4.64]", // reduces
        "LDG.E.128 R8, desc[UR4][R8.64]",
        "STG.E.128 desc[UR4][R24.64], R4",
        "@!P0 BRA 0x120",
        "EXIT",
        "BRA 0x170",
    ];

    /// The shape of a good one-shot by packets for two ranks.
    const PACKETS: [&str; 19] = [
        "ACQBULK",
        "LDG.E.STRONG.GPU R0, desc[UR4][R2.64]", // its own epoch
        "LDG.E R4, desc[UR4][R4.64]",            // stores
        "STG.E.128.STRONG.SYS desc[UR4][R24.64], R4",
        "@!P0 BRA 0x20",
        "STG.E.64.STRONG.SYS desc[UR4][R6.64], R10",  // announces its call
        "LDG.E.128.STRONG.SYS R8, desc[UR4][R12.64]", // polls, and watches for the peer's call
        "LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]",
        "@P1 BRA 0x100",
        "@P2 BRA 0x60",
        "LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]", // looks up
        "LDG.E.STRONG.GPU R0, desc[UR4][R2.64]",
        "LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]", // in the other region
        "@P3 BRA 0x60",
        "ATOMG.E.CAS.STRONG.GPU PT, R14, [R12+0x4], R14, R15", // gives up
        "MEMBAR.ALL.SYS",
        "STG.E desc[UR4][R24.64], R4",
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
        let mut code = FLAGS;
        code[index] = instruction;
        broken("peersum_one_shot_f32_sum_2", &code)
    }

    fn with_packet(index: usize, instruction: &'static str) -> Vec<String> {
        let mut code = PACKETS;
        code[index] = instruction;
        broken("peersum_one_shot_ll_f32_sum_2", &code)
    }

    fn only(broken: &[String], part: &str) {
        assert!(broken.len() == 1 && broken[0].contains(part), "expected '{part}', got {broken:?}");
    }

    fn among(broken: &[String], part: &str) {
        assert!(broken.iter().any(|text| text.contains(part)), "expected '{part}', got {broken:?}");
    }

    #[test]
    fn good_kernels_pass() {
        assert_eq!(broken("peersum_one_shot_f32_sum_2", &FLAGS), Vec::<String>::new());
        assert_eq!(broken("peersum_one_shot_ll_f32_sum_2", &PACKETS), Vec::<String>::new());
    }

    #[test]
    fn narrow_payload_is_found() {
        only(&with(2, "LDG.E.64 R4, desc[UR4][R4.64]"), "1 loops load and store 16 bytes at a time, 2 must");
        only(&with(3, "STG.E desc[UR4][R4.64], R4"), "1 loops load and store 16 bytes at a time, 2 must");
        only(&broken("peersum_one_shot_pull_f32_sum_4", &FLAGS), "no loop loads from all 3 peers");
        only(&broken("peersum_one_shot_f32_sum_3", &FLAGS), "no loop stores to all 2 peers");
        among(&broken("peersum_two_shot_f32_sum_2", &FLAGS), "2 loops load and store 16 bytes at a time, 3 must");
    }

    #[test]
    fn a_weak_or_narrow_flag_is_found() {
        among(&with(8, "STG.E.64 desc[UR4][R6.64], R10"), "0 flags are released");
        among(&with(8, "STG.E.STRONG.SYS desc[UR4][R6.64], R10"), "0 flags are released");
        among(&with(6, "NOP"), "0 flags are released");
        among(&with(6, "NOP"), "1 flags are stored without a system fence");
        among(&with(6, "MEMBAR.SC.GPU"), "0 flags are released");
        among(&with(7, "LDG.E R10, desc[UR4][R12.64]"), "1 flags are stored without a system fence");
        only(&with(9, "LDG.E.64 R10, desc[UR4][R12.64]"), "0 flags are polled by loads that acquire");
        among(&with(9, "LDG.E.64.STRONG.GPU R10, [R12.64]"), "not of system scope");
        only(&with(10, "NOP"), "0 flags are polled by loads that acquire");
        only(&with(12, "NOP"), "0 flags are polled by loads that acquire");
        among(&broken("peersum_two_shot_f32_sum_2", &FLAGS), "1 flags are released at system scope, 2 must");
        among(&broken("peersum_two_shot_f32_sum_2", &FLAGS), "1 flags are polled by loads that acquire, 2 must");
    }

    #[test]
    fn a_torn_or_weak_packet_is_found() {
        among(&with_packet(3, "STG.E.128 desc[UR4][R24.64], R4"), "without being strong at system scope");
        among(&with_packet(6, "LDG.E.128 R8, desc[UR4][R12.64]"), "without being strong at system scope");
        among(&with_packet(6, "LDG.E.128.STRONG.GPU R8, desc[UR4][R12.64]"), "without being strong at system scope");
        let halves = with_packet(3, "STG.E.64.STRONG.SYS desc[UR4][R24.64], R4");
        among(&halves, "no loop stores packets for 1 peers");
        among(&halves, "2 flags are stored without a system fence right before, 1 may");
        let halves = with_packet(6, "LDG.E.64.STRONG.SYS R8, desc[UR4][R12.64]");
        among(&halves, "0 loops poll packets by one access, 1 must");
        among(&halves, "4 flags are loaded without acquiring, 3 may");
        let three = broken("peersum_one_shot_ll_f32_sum_3", &PACKETS);
        among(&three, "no loop polls packets of all 2 peers");
        among(&three, "no loop stores packets for 2 peers");
        only(&with(3, "STG.E.128.STRONG.SYS desc[UR4][R24.64], R4")[1..], "it moves packets");
    }

    #[test]
    fn a_fence_on_the_way_of_packets_is_found() {
        among(&with_packet(4, "MEMBAR.ALL.SYS"), "a fence in a kernel of packets");
        only(&with_packet(2, "MEMBAR.ALL.SYS"), "a fence that releases no flag");
        only(&with_packet(14, "MEMBAR.ALL.SYS"), "a fence that releases no flag");
        // What the claim doesn't come before is not giving up.
        only(&with_packet(14, "NOP"), "a fence that releases no flag");
        only(&with_packet(14, "@P4 ATOMG.E.CAS.STRONG.GPU PT, R14, [R12+0x4], R14, R15"), "releases no flag");
    }

    #[test]
    fn other_paths_to_memory_are_found() {
        only(&with(18, "LDG.E.128.CONSTANT R4, desc[UR4][R4.64]"), "may read what a peer has overwritten");
        only(&with_packet(2, "LDG.E.CONSTANT R4, desc[UR4][R4.64]"), "may read what a peer has overwritten");
        only(&with(5, "LD.E R4, desc[UR4][R4.64]"), "generic address");
        only(&with(22, "STL [R1], R0"), "uses local memory");
        only(&with_packet(15, "LDL R0, [R1]"), "uses local memory");
        among(&with_packet(4, "LDG.E.STRONG.GPU R4, desc[UR4][R4.64]"), "not of system scope");
        only(&with(5, "RED.E.ADD.STRONG.SYS [R4.64], R0"), "the one atomic");
    }

    #[test]
    fn work_before_the_wait_for_the_last_kernel_is_found() {
        only(&with(0, "NOP"), "LDG.E.STRONG.GPU comes before the wait");
        only(&with(0, "@P0 ACQBULK"), "LDG.E.STRONG.GPU comes before the wait");
        only(&with(0, "PREEXIT"), "PREEXIT comes before the wait");
    }

    #[test]
    fn a_fence_among_payload_is_found() {
        among(&with(19, "MEMBAR.ALL.SYS"), "a loop over payload has a fence");
        among(&with(19, "MEMBAR.ALL.SYS"), "a fence that releases no flag");
    }

    #[test]
    fn names_are_read() {
        let kernel = Kernel::of("peersum_two_shot_pull_bf16_sum_8").unwrap();
        assert_eq!((kernel.algorithm, &*kernel.dtype, kernel.world), (Algorithm::TwoShotPull, "bf16", 8));
        assert_eq!(Kernel::of("peersum_one_shot_f32_sum_2").unwrap().algorithm, Algorithm::OneShot);
        assert_eq!(Kernel::of("peersum_two_shot_ll_f16_extreme_3").unwrap().algorithm, Algorithm::TwoShotLl);
        for helper in ["peersum_fill_f32", "peersum_check_bf16", "peersum_advance"] {
            assert_eq!(Kernel::of(helper), None);
        }
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
        assert_eq!(missing(&kernels, &["f32", "f16"]).len(), 2 * Algorithm::ALL.len() * 7);
        kernels.pop_first();
        assert_eq!(missing(&kernels, &["f32"]).len(), 1);
    }
}
