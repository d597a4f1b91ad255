//! What the machine code of every all-reduce kernel must have, whatever the compiler made of the source.

use std::collections::BTreeSet;

use peersum::Algorithm;

use super::listing::{Function, Instruction, inside};

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
        if let Some(world) = rest.strip_prefix("gate_") {
            return Some(Kernel::gate(world.parse().ok()?));
        }
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

    /// The gate before NCCL, which moves no payload.
    fn gate(world: usize) -> Kernel {
        Kernel { algorithm: Algorithm::Nccl, dtype: String::new(), reduction: String::new(), world }
    }

    fn peers(&self) -> usize {
        self.world - 1
    }

    /// How many ranks take what a two-shot or a one-shot reduces: the outputs of a direct kernel.
    fn outputs(&self) -> usize {
        if self.algorithm == Algorithm::TwoShotDirect { self.world } else { 1 }
    }

    /// The forms of a one-shot by packets for short messages, by how many packets a thread has.
    fn short_forms(&self) -> &'static [usize] {
        match (self.algorithm, self.world) {
            (Algorithm::OneShotLl, ..=4) => &[1, 2],
            (Algorithm::OneShotLl, _) => &[1],
            _ => &[],
        }
    }

    /// The kernels in this one, of which a call takes one: each begins, moves its payload and ends by itself.
    fn forms(&self) -> usize {
        self.short_forms().len() + 1
    }

    /// Places where packets are polled: one a round, in every form.
    fn packet_polls(&self) -> usize {
        match self.algorithm {
            Algorithm::OneShotLl => self.forms(),
            Algorithm::TwoShotLl => 2,
            _ => 0,
        }
    }

    /// Rounds whose flags say that payload has been written, and so release it and acquire it.
    fn released_rounds(&self) -> usize {
        match self.algorithm {
            Algorithm::OneShot | Algorithm::OneShotPull => 1,
            Algorithm::TwoShot | Algorithm::TwoShotPull => 2,
            // The exit alone, behind which the output is whole.
            Algorithm::TwoShotDirect => 1,
            _ => 0,
        }
    }

    /// Rounds whose flags say that a rank has come, or has read, and order nothing else.
    fn relaxed_rounds(&self) -> usize {
        match self.algorithm {
            Algorithm::OneShotDirect => 2,
            Algorithm::TwoShotDirect | Algorithm::Nccl => 1,
            _ => 0,
        }
    }

    /// Places where packets of no round are stored: one a round that the last chunk has, in every form.
    fn sweeps(&self) -> usize {
        self.packet_polls()
    }

    fn flag_rounds(&self) -> usize {
        self.released_rounds() + self.relaxed_rounds()
    }
}

/// From the wait for the last kernel to the first packet of a short form, the instructions that the shortest way may have:
/// two loads, that of its input, the parity of the epoch added to every place, and the packet put together.
const BEFORE_THE_FIRST_PACKET: usize = 56;

/// What of the contract this function breaks.
pub(crate) fn violations(function: &Function, kernel: &Kernel) -> Vec<String> {
    let mut broken = packets(function, kernel);
    if kernel.algorithm.is_direct() {
        broken.extend(direct(function, kernel));
    } else if kernel.released_rounds() > 0 {
        broken.extend(payload(function, kernel));
    }
    broken.extend(short_forms(function, kernel));
    broken.extend(sweeps(function, kernel));
    broken.extend(flags(function, kernel));
    broken.extend(addressing(function, kernel));
    broken.extend(beginning(function, kernel));
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
    // One-shot stages and reduces; two-shot scatters, reduces and gathers.
    let needed = 1 + kernel.flag_rounds();
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

/// A direct kernel loads every rank's tensor 16 bytes at a time at system scope, between two meetings of the ranks, and
/// stores plainly. Elements that are in no pack move likewise, one by one.
fn direct(function: &Function, kernel: &Kernel) -> Vec<String> {
    let (world, outputs) = (kernel.world, kernel.outputs());
    let count =
        |body: &[Instruction], wanted: &dyn Fn(&Instruction) -> bool| body.iter().filter(|one| wanted(one)).count();
    let is_load = |one: &Instruction| is_packet(one, "LDG");
    let is_narrow_load = |one: &Instruction| one.base() == "LDG" && is_system_strong(one) && is_narrow(one);
    let is_store = |one: &Instruction, wide: bool| {
        one.base() == "STG" && !one.has("STRONG") && if wide { is_wide(one) } else { is_narrow(one) }
    };
    let mut broken = Vec::new();

    let packs = function.smallest_loops_with(is_load);
    if packs.len() != 1 {
        broken.push(format!("{} loops load tensors 16 bytes at a time, 1 must", packs.len()));
    }
    for body in packs {
        // Several places at once, each of which has every rank's pack.
        let (loads, stores) = (count(body, &is_load), count(body, &|one| is_store(one, true)));
        if loads == 0 || loads % world != 0 {
            broken.push(format!("{loads} packs of {world} ranks are loaded at once"));
        }
        // Once, or in an arm each for the two operations that the kernel serves.
        if ![1, 2].iter().any(|arms| stores * world == arms * loads * outputs) {
            broken.push(format!("of {loads} packs of {world} ranks {stores} are stored, {outputs} must of {world}"));
        }
        let loads: Vec<_> = (0..body.len()).filter(|&index| is_load(&body[index])).collect();
        for place in loads.chunks(world) {
            broken.extend(together(&body[place[0]..=place[place.len() - 1]]));
        }
    }
    // Code that lies behind the end and goes back makes seeming loops, with a barrier in them.
    let is_barrier = |one: &Instruction| one.base() == "BAR";
    let elements = function.smallest_loops_with(|one| is_store(one, false));
    let elements: Vec<_> = elements.into_iter().filter(|body| !body.iter().any(is_barrier)).collect();
    if elements.len() != 1 {
        broken.push(format!("{} loops store element by element, 1 must", elements.len()));
    }
    for body in elements {
        let (loads, stores) = (count(body, &is_narrow_load), count(body, &|one| is_store(one, false)));
        if (loads, stores) != (world, outputs) {
            broken.push(format!("{loads} elements are loaded and {stores} stored, {world} and {outputs} must"));
        }
    }
    if let Some(weak) = function.instructions.iter().find(|one| one.base() == "LDG" && !one.has("STRONG")) {
        broken.push(format!("{} may find in L1 what a peer's tensor held before", weak.opcode));
    }

    // Tensors are touched when the whole block has met the peers, and it meets them again when all of it is done.
    let is_access = |one: &Instruction| is_load(one) || is_store(one, true) || is_store(one, false);
    let places = |is: &dyn Fn(&Instruction) -> bool| -> Vec<usize> {
        (0..function.instructions.len()).filter(|&index| is(&function.instructions[index])).collect()
    };
    let any = |reached: &[bool], is: &dyn Fn(&Instruction) -> bool| {
        function.instructions.iter().zip(reached).any(|(one, reached)| *reached && is(one))
    };
    match function.reachable_without(is_barrier) {
        Ok(early) if any(&early, &is_access) => {
            broken.push("a tensor is touched before the block has met the peers".into())
        }
        Ok(_) => {}
        Err(unknown) => broken.push(unknown),
    }
    match function.reachable_from(places(&is_load), is_barrier) {
        Ok(behind) if any(&behind, &|one| is_flag(one, "STG")) => {
            broken.push("a flag is stored before all threads have read".into());
        }
        Ok(_) => {}
        Err(unknown) => broken.push(unknown),
    }
    broken
}

/// A packet is stored and polled by one access of system scope: in two it could come torn.
fn packets(function: &Function, kernel: &Kernel) -> Vec<String> {
    let mut broken = Vec::new();
    let any = |base: &str| function.instructions.iter().any(|one| is_packet(one, base));
    if kernel.packet_polls() == 0 {
        if any("STG") || any("LDG") && !kernel.algorithm.is_direct() {
            broken.push("it moves packets, and is a kernel of flags alone".into());
        }
        return broken;
    }
    // Tensors are moved word by word here, so whatever is wide is a packet.
    let is_plain = |one: &&Instruction| touches_global(one) && is_wide(one) && !is_system_strong(one);
    if let Some(plain) = function.instructions.iter().find(is_plain) {
        broken.push(format!("{} moves a packet without being strong at system scope", plain.opcode));
    }
    let peers = kernel.peers();
    let polls = function.smallest_loops_with(|one| is_packet(one, "LDG"));
    let stores = function.smallest_loops_with(is_sent);
    let most = |loops: &[&[Instruction]], is: &dyn Fn(&Instruction) -> bool| {
        loops.iter().map(|body| body.iter().filter(|one| is(one)).count()).max().unwrap_or(0)
    };
    let needed = kernel.packet_polls();
    if polls.len() != needed {
        broken.push(format!("{} loops poll packets by one access, {needed} must", polls.len()));
    }
    if most(&polls, &|one| is_packet(one, "LDG")) < peers {
        broken.push(format!("no loop polls packets of all {peers} peers"));
    }
    if most(&stores, &is_sent) < peers {
        broken.push(format!("no loop stores packets for {peers} peers by one access each"));
    }
    broken
}

/// The forms for short messages are the ones that poll outside of a loop over chunks. They store and poll what a thread has
/// at once, and poll it by loads that go out together, from places that were computed before.
fn short_forms(function: &Function, kernel: &Kernel) -> Vec<String> {
    let forms = kernel.short_forms();
    if forms.is_empty() {
        return Vec::new();
    }
    let (world, loops) = (kernel.world, function.loops());
    let mut broken = Vec::new();
    let polls = function.smallest_loops_with(|one| is_packet(one, "LDG"));
    let short: Vec<_> = polls.into_iter().filter(|poll| !loops.iter().any(|outer| inside(poll, outer))).collect();
    let mut polled: Vec<_> = short.iter().map(|poll| poll.iter().filter(|one| is_packet(one, "LDG")).count()).collect();
    polled.sort_unstable();
    let needed: Vec<_> = forms.iter().map(|packets| packets * world).collect();
    if polled != needed {
        broken.push(format!("short forms poll {polled:?} packets, {needed:?} must"));
    }
    for poll in short {
        broken.extend(together(poll));
        if let Some(computed) = computed_place(poll) {
            broken.push(format!("{} computes the place of a packet in every turn of a poll", computed.opcode));
        }
    }

    let stored = function.instructions.iter().filter(|one| is_sent(one) && !is_in(&loops, one)).count();
    // Among more than four a rank stores to itself too.
    let receivers = if world > 4 { world } else { kernel.peers() };
    let needed = receivers * forms.iter().sum::<usize>();
    if stored != needed {
        broken.push(format!("short forms store {stored} packets, {needed} must"));
    }
    broken
}

/// Each form ends with a loop for each of its last rounds, which stores packets of no round; nobody's packets wait for it. The
/// block has concluded before, so that no peer still polls what is cleared.
fn sweeps(function: &Function, kernel: &Kernel) -> Vec<String> {
    let needed = kernel.sweeps();
    let mut broken = Vec::new();
    let places: Vec<_> =
        (0..function.instructions.len()).filter(|&index| is_cleared(&function.instructions[index])).collect();
    let loops = function.smallest_loops_with(is_cleared);
    if (places.len(), loops.len()) != (needed, needed) {
        broken.push(format!("{} stores in {} loops clear slots, {needed} must", places.len(), loops.len()));
    }
    if loops.iter().any(|body| body.iter().any(|one| is_sent(one) || is_packet(one, "LDG"))) {
        broken.push("a loop that clears slots moves packets too".into());
    }
    match function.reachable_without(|one| one.base() == "BAR") {
        Ok(early) if places.iter().any(|&place| early[place]) => {
            broken.push("slots are cleared before the block has concluded".into());
        }
        Ok(_) => {}
        Err(unknown) => broken.push(unknown),
    }
    match function.reachable_from(places, |_| false) {
        Ok(behind)
            if function
                .instructions
                .iter()
                .zip(&behind)
                .any(|(one, behind)| *behind && (is_sent(one) || is_packet(one, "LDG"))) =>
        {
            broken.push("packets are moved behind the clearing of slots".into());
        }
        Ok(_) => {}
        Err(unknown) => broken.push(unknown),
    }
    broken
}

/// What computes a place of a packet within the loop that polls it. A place may be copied there from where it is kept.
fn computed_place(poll: &[Instruction]) -> Option<&Instruction> {
    let is_copy = |one: &Instruction| !one.predicated && (one.base() == "MOV" || one.opcode.starts_with("IMAD.MOV"));
    for (index, packet) in poll.iter().enumerate().filter(|(_, one)| is_packet(one, "LDG")) {
        for mut register in packet.address_registers() {
            for before in poll[..index].iter().rev() {
                if before.written().contains(&register) {
                    let from = before.read().first().copied().filter(|_| is_copy(before));
                    let Some(from) = from else { return Some(before) };
                    register = from;
                }
            }
            // As it comes into one turn, it must go into the next.
            if let Some(changed) = poll.iter().find(|one| one.written().contains(&register)) {
                return Some(changed);
            }
        }
    }
    None
}

/// The 16-byte loads go out one behind the other, with no branch between, before anything is made of what one brings.
fn together(body: &[Instruction]) -> Vec<String> {
    let is_load = |one: &Instruction| is_packet(one, "LDG");
    let (Some(first), Some(last)) = (body.iter().position(is_load), body.iter().rposition(is_load)) else {
        return Vec::new();
    };
    let mut broken = Vec::new();
    let mut loaded = BTreeSet::new();
    for instruction in &body[first..=last] {
        if instruction.is_branch() {
            broken.push(format!("{} parts 16-byte loads from each other", instruction.opcode));
            break;
        }
        if !loaded.is_disjoint(&instruction.read()) {
            broken.push(format!("{} waits for a 16-byte load before the others go out", instruction.opcode));
            break;
        }
        if is_load(instruction) {
            loaded.extend(instruction.written());
        }
    }
    broken
}

/// Flags go at system scope. What announces payload is fenced before, by nothing else is there a fence, and a poll of it
/// drops the L1 cache. Who gives up may do more: that is what comes behind the claim.
fn flags(function: &Function, kernel: &Kernel) -> Vec<String> {
    let mut broken = Vec::new();
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

    let rounds = kernel.released_rounds();
    let fences = places(&|one| one.base() == "MEMBAR");
    let (releases, others): (Vec<usize>, Vec<usize>) = fences
        .into_iter()
        .partition(|&fence| is_system_fence(memory[fence]) && follows(fence, &|next| is_flag(next, "STG")));
    if !others.is_empty() {
        broken.push("a fence that releases no flag, outside of giving up".into());
    }
    if releases.len() != rounds {
        broken.push(format!("{} flags are released at system scope, {rounds} must", releases.len()));
    }
    // The others are stored without a fence: for a round of them by a lane a peer; packets are announced by one thread a
    // peer, or where the code is unrolled by one for all. More of them would be the halves of packets.
    let stores = places(&|one| is_flag(one, "STG"));
    let relaxed = stores.len() - releases.len();
    let announcements = match kernel.algorithm {
        Algorithm::OneShotLl => kernel.forms(),
        Algorithm::TwoShotLl => 1 + kernel.peers(),
        _ => kernel.relaxed_rounds(),
    };
    if relaxed != announcements {
        broken.push(format!("{relaxed} flags are stored without a system fence right before, {announcements} must"));
    }

    let loads = places(&|one| is_flag(one, "LDG"));
    let (acquires, looks): (Vec<usize>, Vec<usize>) =
        loads.into_iter().partition(|&load| follows(load, &|next| next.opcode == "CCTL.IVALL"));
    let loops = function.loops();
    let polls = |load: &&usize| is_in(&loops, memory[**load]);
    // A look up from a poll loads this rank's epoch in the other region, and acquires the peer's flag there.
    let lookups = kernel.flag_rounds() + kernel.packet_polls();
    let (others, acquires): (Vec<usize>, Vec<usize>) =
        acquires.into_iter().partition(|&load| load > 0 && is_epoch(memory[load - 1]));
    if others.len() != lookups {
        broken.push(format!("{} flags of the other region are acquired, {lookups} must", others.len()));
    }
    let polled = acquires.iter().filter(polls).count();
    if polled != rounds || acquires.len() != rounds {
        broken.push(format!("{polled} flags are polled by loads that acquire, {rounds} must"));
    }
    // It loads the peer's flag of this region before and after; where flags order nothing, the poll itself does; and in a poll of packets the watch for the peer's call, which in two-shot only the second round has.
    let watches = if kernel.algorithm == Algorithm::TwoShotLl { 1 } else { kernel.packet_polls() };
    let relaxed = 2 * lookups + kernel.relaxed_rounds() + watches;
    let polled = looks.iter().filter(polls).count();
    if looks.len() != relaxed || polled != relaxed {
        broken.push(format!("{} flags are loaded without acquiring, {polled} in polls, {relaxed} must", looks.len()));
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
    // But this rank's own epoch, which comes from L2: at the start of each form, and in a look up from a poll that of the
    // other region.
    let (epochs, narrow): (Vec<_>, Vec<_>) =
        function.instructions.iter().filter(is_narrow).partition(|one| is_epoch(one));
    if let Some(instruction) = narrow.first() {
        broken.push(format!("{} is not of system scope", instruction.opcode));
    }
    let own = kernel.forms() + kernel.flag_rounds() + kernel.packet_polls();
    if epochs.len() != own {
        broken.push(format!("{} epochs are loaded from L2, {own} must", epochs.len()));
    }
    if let Some(opcode) = any(&|one| matches!(one.base(), "RED" | "REDG") || one.base() == "ATOMG" && !is_claim(one)) {
        broken.push(format!("{opcode} is not the claim, the one atomic that is needed"));
    }
    if let Some(opcode) = any(&is_local) {
        broken.push(format!("{opcode} uses local memory"));
    }
    broken
}

/// Where kernels overlap, none touches memory, or lets the next one come, before it has waited for the last; and what a
/// short form can compute before, it doesn't compute behind.
fn beginning(function: &Function, kernel: &Kernel) -> Vec<String> {
    let number = function.architecture.trim_start_matches("sm_").parse::<u32>().unwrap_or(0);
    if number < 90 {
        return Vec::new();
    }
    let is_wait = |instruction: &Instruction| instruction.base() == "ACQBULK";
    let before = match function.reachable_without(is_wait) {
        Ok(reached) => reached,
        Err(unknown) => return vec![unknown],
    };
    let early = |instruction: &Instruction| {
        instruction.base() == "PREEXIT" || is_local(instruction) || touches_global(instruction)
    };
    let found = function.instructions.iter().zip(before).find(|(instruction, before)| *before && early(instruction));
    let mut broken: Vec<_> =
        found.map(|(one, _)| format!("{} comes before the wait for the last kernel", one.opcode)).into_iter().collect();

    let waits: Vec<_> = (0..function.instructions.len()).filter(|&at| is_wait(&function.instructions[at])).collect();
    if waits.len() != kernel.forms() {
        broken.push(format!("{} waits for the last kernel, {} must", waits.len(), kernel.forms()));
    }
    // The form for long messages stores in loops, where it computes the places.
    let loops = function.loops();
    let is_short = |one: &Instruction| is_sent(one) && !is_in(&loops, one);
    let ways: Result<Vec<_>, _> = waits.iter().map(|&wait| function.fewest_between(wait, is_short)).collect();
    match ways {
        Ok(ways) => {
            let ways: Vec<_> = ways.into_iter().flatten().collect();
            let needed = kernel.short_forms().len();
            if ways.len() != needed {
                broken
                    .push(format!("{} waits for the last kernel come before a short form, {needed} must", ways.len()));
            }
            for way in ways.into_iter().filter(|way| *way > BEFORE_THE_FIRST_PACKET) {
                broken.push(format!(
                    "{way} instructions from the wait for the last kernel to a packet, {BEFORE_THE_FIRST_PACKET} may"
                ));
            }
        }
        Err(unknown) => broken.push(unknown),
    }
    broken
}

/// The kernels that must be there and are not.
pub(crate) fn missing(present: &BTreeSet<Kernel>, dtypes: &[impl AsRef<str>]) -> Vec<String> {
    let reductions = present.iter().filter(|kernel| kernel.algorithm != Algorithm::Nccl);
    let reductions: BTreeSet<_> = reductions.map(|kernel| kernel.reduction.clone()).collect();
    let gates = (2..=8).map(Kernel::gate).filter(|gate| !present.contains(gate));
    let mut missing: Vec<_> = gates.map(|gate| format!("{gate:?}")).collect();
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

/// An element of the caller's.
fn is_narrow(instruction: &Instruction) -> bool {
    !["64", "128", "256"].iter().any(|modifier| instruction.has(modifier))
}

/// One access of 16 bytes at system scope: an LL packet, or a pack of a tensor in symmetric memory.
fn is_packet(instruction: &Instruction, base: &str) -> bool {
    instruction.base() == base && instruction.has("128") && is_system_strong(instruction)
}

/// A packet of no round, which is all zeros.
fn is_cleared(instruction: &Instruction) -> bool {
    is_packet(instruction, "STG") && instruction.operands.rsplit(',').next().is_some_and(|data| data.trim() == "RZ")
}

/// A packet that carries something: its epoch at least.
fn is_sent(instruction: &Instruction) -> bool {
    is_packet(instruction, "STG") && !is_cleared(instruction)
}

fn is_flag(instruction: &Instruction, base: &str) -> bool {
    instruction.base() == base && instruction.has("64") && is_system_strong(instruction)
}

/// This rank's own epoch of a region, from L2.
fn is_epoch(instruction: &Instruction) -> bool {
    instruction.opcode == "LDG.E.STRONG.GPU"
}

fn is_system_strong(instruction: &Instruction) -> bool {
    instruction.has("STRONG") && instruction.has("SYS")
}

/// Who gives up claims the record first.
fn is_claim(instruction: &Instruction) -> bool {
    instruction.opcode == "ATOMG.E.CAS.STRONG.GPU"
}

fn is_in(loops: &[&[Instruction]], instruction: &Instruction) -> bool {
    loops.iter().any(|body| body.iter().any(|one| std::ptr::eq(one, instruction)))
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
    const FLAGS: [&str; 29] = [
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
        "@P1 BRA 0x160",
        "LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]", // looks up
        "LDG.E.STRONG.GPU R0, desc[UR4][R2.64]",
        "LDG.E.64.STRONG.SYS R10, desc[UR4][R14.64]", // in the other region
        "CCTL.IVALL",
        "LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]", // and again
        "@P2 BRA 0x90",
        "ATOMG.E.CAS.STRONG.GPU PT, R14, [R12+0x4], R14, R15", // gives up
        "MEMBAR.ALL.SYS",
        "CCTL.IVALL",
        "STG.E.STRONG.SYS desc[UR4][R16.64], R0",
        "BAR.RED.AND.DEFER_BLOCKING 0x0, P0",
        "LDG.E.128 R4, desc[UR4][R4.64]", // reduces
        "LDG.E.128 R8, desc[UR4][R8.64]",
        "STG.E.128 desc[UR4][R24.64], R4",
        "@!P0 BRA 0x170",
        "EXIT",
        "BRA 0x1c0",
    ];

    /// Instructions of this source, in which `name:` is the place that `=name` means.
    fn assembled(source: &str) -> Vec<String> {
        let (labels, lines): (Vec<_>, Vec<_>) = source
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .scan(0, |address, line| {
                let at = *address;
                *address += if line.ends_with(':') { 0 } else { 16 };
                Some((at, line))
            })
            .partition(|(_, line)| line.ends_with(':'));
        let resolve = |(_, line): (u64, &str)| match line.split_once('=') {
            Some((start, name)) => {
                let found = labels.iter().find(|(_, label)| label.trim_end_matches(':') == name);
                format!("{start}0x{:x}", found.unwrap_or_else(|| panic!("no label {name}")).0)
            }
            None => line.to_owned(),
        };
        lines.into_iter().map(resolve).collect()
    }

    fn repeated(count: usize, line: impl Fn(usize) -> String) -> String {
        (0..count).map(|index| line(index) + "\n").collect()
    }

    /// What goes on in a poll when it isn't done.
    fn looking_up(poll: &str) -> String {
        format!(
            "@P2 BRA ={poll}
            LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]
            LDG.E.STRONG.GPU R0, desc[UR4][R2.64]
            LDG.E.64.STRONG.SYS R10, desc[UR4][R14.64]
            CCTL.IVALL
            LDG.E.64.STRONG.SYS R10, desc[UR4][R12.64]
            @P3 BRA ={poll}
            ATOMG.E.CAS.STRONG.GPU PT, R14, [R12+0x4], R14, R15
            MEMBAR.ALL.SYS
            STG.E.STRONG.SYS desc[UR4][R16.64], R0"
        )
    }

    /// A poll of packets, with what is watched beside them.
    fn polling(name: &str, packets: usize) -> String {
        let loads = repeated(packets, |index| {
            format!("LDG.E.128.STRONG.SYS R{}, desc[UR4][R{}.64]", 100 + 4 * index, 200 + 2 * index)
        });
        let look = looking_up(name);
        format!(
            "STG.E.64.STRONG.SYS desc[UR4][R6.64], R10
            {name}:
            {loads}
            LDG.E.64.STRONG.SYS R10, desc[UR4][R18.64]
            LOP3.LUT P1, RZ, R103, R30, RZ, 0xc0, !PT
            @P1 BRA =behind_{name}
            {look}
            behind_{name}:"
        )
    }

    /// The end of a form.
    fn sweeping(name: &str) -> String {
        format!(
            "BAR.RED.AND.DEFER_BLOCKING 0x0, P0
            @P6 EXIT
            sweep_{name}:
            STG.E.128.STRONG.SYS desc[UR4][R28.64], RZ
            @!P0 BRA =sweep_{name}
            EXIT"
        )
    }

    fn short_form(packets: usize, world: usize) -> String {
        let receivers = if world > 4 { world } else { world - 1 };
        let stores = repeated(packets * receivers, |_| "STG.E.128.STRONG.SYS desc[UR4][R24.64], R4".into());
        let name = format!("short_{packets}");
        let (poll, sweep) = (polling(&name, packets * world), sweeping(&name));
        format!(
            "form_{packets}:
            ACQBULK
            LDG.E.STRONG.GPU R0, desc[UR4][R2.64]
            LDG.E R4, desc[UR4][R4.64]
            {stores}
            {poll}
            STG.E desc[UR4][R24.64], R4
            {sweep}"
        )
    }

    /// The shape of a good one-shot by packets.
    fn one_shot_by_packets(world: usize) -> String {
        let forms = if world > 4 { short_form(1, world) } else { short_form(1, world) + "\n" + &short_form(2, world) };
        let other = if world > 4 { "" } else { "@P1 BRA =form_2" };
        let stores = repeated(world - 1, |_| "STG.E.128.STRONG.SYS desc[UR4][R26.64], R4".into());
        let (poll, sweep) = (polling("long", world), sweeping("long"));
        format!(
            "@P0 BRA =form_0
            {other}
            {forms}
            form_0:
            ACQBULK
            LDG.E.STRONG.GPU R0, desc[UR4][R2.64]
            chunk:
            LDG.E R5, desc[UR4][R4.64]
            {stores}
            @!P0 BRA =chunk
            {poll}
            STG.E desc[UR4][R26.64], R4
            @!P0 BRA =chunk
            {sweep}"
        )
    }

    /// The shape of a good direct kernel: one-shot, or with more outputs than one two-shot.
    fn direct_kernel(world: usize, outputs: usize) -> String {
        let (release, acquire) = if outputs > 1 { ("MEMBAR.ALL.SYS", "CCTL.IVALL") } else { ("", "") };
        let packs = repeated(world, |rank| {
            format!("LDG.E.128.STRONG.SYS R{}, desc[UR4][R{}.64]", 100 + 4 * rank, 200 + 2 * rank)
        });
        let elements =
            repeated(world, |rank| format!("LDG.E.U16.STRONG.SYS R{}, desc[UR4][R{}.64]", 100 + rank, 200 + 2 * rank));
        let store_packs = repeated(outputs, |_| "STG.E.128 desc[UR4][R26.64], R4".into());
        let store_elements = repeated(outputs, |_| "STG.E.U16 desc[UR4][R26.64], R4".into());
        let (enter, exit) = (looking_up("enter"), looking_up("exit"));
        format!(
            "ACQBULK
            LDG.E.STRONG.GPU R0, desc[UR4][R2.64]
            STG.E.64.STRONG.SYS desc[UR4][R6.64], R8
            enter:
            LDG.E.64.STRONG.SYS R10, desc[UR4][R18.64]
            @P1 BRA =entered
            {enter}
            entered:
            BAR.RED.AND.DEFER_BLOCKING 0x0, P0
            packs:
            {packs}
            FADD R4, R100, R104
            {store_packs}
            @!P0 BRA =packs
            elements:
            {elements}
            FADD R4, R100, R101
            {store_elements}
            @!P0 BRA =elements
            BAR.SYNC.DEFER_BLOCKING 0x0
            {release}
            STG.E.64.STRONG.SYS desc[UR4][R6.64], R10
            exit:
            LDG.E.64.STRONG.SYS R10, desc[UR4][R20.64]
            {acquire}
            @P1 BRA =left
            {exit}
            left:
            BAR.RED.AND.DEFER_BLOCKING 0x0, P0
            STG.E desc[UR4][R2.64], R0
            EXIT"
        )
    }

    fn gate_kernel() -> String {
        format!(
            "ACQBULK
            LDG.E.STRONG.GPU R0, desc[UR4][R2.64]
            STG.E.64.STRONG.SYS desc[UR4][R6.64], R8
            meet:
            LDG.E.64.STRONG.SYS R10, desc[UR4][R18.64]
            @P1 BRA =met
            {}
            met:
            BAR.RED.AND.DEFER_BLOCKING 0x0, P0
            STG.E desc[UR4][R2.64], R0
            EXIT",
            looking_up("meet")
        )
    }

    fn broken(name: &str, code: &[impl AsRef<str>]) -> Vec<String> {
        let mut listing = format!("code for sm_90\nFunction : {name}\n");
        for (index, line) in code.iter().enumerate() {
            listing += &format!("/*{:04x}*/ {} ; /* 0x0 */\n", index * 16, line.as_ref());
        }
        violations(&functions(&listing)[0], &Kernel::of(name).unwrap())
    }

    /// What breaks when the instruction at `index` is another.
    fn with(index: usize, instruction: &'static str) -> Vec<String> {
        let mut code = FLAGS;
        code[index] = instruction;
        broken("peersum_one_shot_f32_sum_2", &code)
    }

    /// What breaks when the first such text of a source is another.
    fn changed(name: &str, source: &str, from: &str, to: &str) -> Vec<String> {
        assert!(source.contains(from), "no '{from}'");
        broken(name, &assembled(&source.replacen(from, to, 1)))
    }

    fn packets_with(from: &str, to: &str) -> Vec<String> {
        changed("peersum_one_shot_ll_f32_sum_2", &one_shot_by_packets(2), from, to)
    }

    fn direct_with(from: &str, to: &str) -> Vec<String> {
        changed("peersum_one_shot_direct_f16_sum_3", &direct_kernel(3, 1), from, to)
    }

    fn two_shot_direct_with(from: &str, to: &str) -> Vec<String> {
        changed("peersum_two_shot_direct_f16_sum_3", &direct_kernel(3, 3), from, to)
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
        for world in 2..=8 {
            let name = |algorithm: &str| format!("peersum_{algorithm}_f16_sum_{world}");
            let none = Vec::<String>::new();
            assert_eq!(broken(&name("one_shot_ll"), &assembled(&one_shot_by_packets(world))), none);
            assert_eq!(broken(&name("one_shot_direct"), &assembled(&direct_kernel(world, 1))), none);
            assert_eq!(broken(&name("two_shot_direct"), &assembled(&direct_kernel(world, world))), none);
            assert_eq!(broken(&format!("peersum_gate_{world}"), &assembled(&gate_kernel())), none);
        }
    }

    #[test]
    fn a_gate_that_orders_payload_or_does_not_wait_is_found() {
        let gate = |from: &str, to: &str| broken("peersum_gate_4", &assembled(&gate_kernel().replacen(from, to, 1)));
        let store = "STG.E.64.STRONG.SYS desc[UR4][R6.64], R8";
        among(&gate(store, &format!("MEMBAR.ALL.SYS\n{store}")), "1 flags are released at system scope, 0 must");
        among(&gate(store, ""), "0 flags are stored without a system fence right before, 1 must");
        among(&gate("LDG.E.64.STRONG.SYS R10, desc[UR4][R18.64]", ""), "flags are loaded without acquiring");
        among(&gate("ACQBULK", ""), "before the wait for the last kernel");
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
        among(&with(10, "NOP"), "0 flags are polled by loads that acquire");
        among(&with(17, "NOP"), "0 flags are polled by loads that acquire");
        among(&broken("peersum_two_shot_f32_sum_2", &FLAGS), "1 flags are released at system scope, 2 must");
        among(&broken("peersum_two_shot_f32_sum_2", &FLAGS), "1 flags are polled by loads that acquire, 2 must");
    }

    #[test]
    fn a_torn_or_weak_packet_is_found() {
        let (load, store) = ("LDG.E.128.STRONG.SYS R100", "STG.E.128.STRONG.SYS desc[UR4][R24.64]");
        among(&packets_with(store, "STG.E.128 desc[UR4][R24.64]"), "without being strong at system scope");
        among(&packets_with(load, "LDG.E.128 R100"), "without being strong at system scope");
        among(&packets_with(load, "LDG.E.128.STRONG.GPU R100"), "without being strong at system scope");
        let halves = packets_with(store, "STG.E.64.STRONG.SYS desc[UR4][R24.64]");
        among(&halves, "short forms store 2 packets, 3 must");
        among(&halves, "4 flags are stored without a system fence right before, 3 must");
        let halves = packets_with("STG.E.128.STRONG.SYS desc[UR4][R26.64]", "STG.E.64.STRONG.SYS desc[UR4][R26.64]");
        among(&halves, "no loop stores packets for 1 peers");
        let halves = packets_with(load, "LDG.E.64.STRONG.SYS R100");
        among(&halves, "short forms poll [1, 4] packets, [2, 4] must");
        among(&halves, "10 flags are loaded without acquiring, 10 in polls, 9 must");
        let three = broken("peersum_one_shot_ll_f32_sum_3", &assembled(&one_shot_by_packets(2)));
        among(&three, "short forms poll [2, 4] packets, [3, 6] must");
        among(&three, "short forms store 3 packets, 6 must");
        among(&three, "no loop stores packets for 2 peers");
        let ll = broken("peersum_two_shot_ll_f32_sum_6", &assembled(&one_shot_by_packets(2)));
        among(&ll, "3 loops poll packets by one access, 2 must");
        among(&ll, "no loop polls packets of all 5 peers");
        only(&with(3, "STG.E.128.STRONG.SYS desc[UR4][R24.64], R4")[..1], "it moves packets");
    }

    #[test]
    fn a_form_that_is_missing_or_does_not_store_to_itself_is_found() {
        let five = one_shot_by_packets(5);
        let name = "peersum_one_shot_ll_f32_sum_5";
        let store = "STG.E.128.STRONG.SYS desc[UR4][R24.64], R4";
        only(&changed(name, &five, store, "NOP"), "short forms store 4 packets, 5 must");
        among(&broken(name, &assembled(&one_shot_by_packets(2))), "short forms poll [2, 4] packets, [5] must");
        among(&broken("peersum_one_shot_ll_f32_sum_2", &assembled(&five)), "2 waits for the last kernel, 3 must");
    }

    #[test]
    fn loads_of_packets_that_do_not_go_out_together_are_found() {
        let second = "LDG.E.128.STRONG.SYS R104";
        for (between, part) in [
            ("@P5 BRA =behind_short_1", "BRA parts 16-byte loads"),
            ("BSYNC B0", "BSYNC parts 16-byte loads"),
            ("LOP3.LUT P4, RZ, R103, R30, RZ, 0xc0, !PT", "LOP3.LUT waits for a 16-byte load"),
            ("IADD3 R31, R31, R100, RZ", "IADD3 waits for a 16-byte load"),
            ("IMAD.WIDE.U32 R202, R31, R32, R34", "IMAD.WIDE.U32 computes the place of a packet in every turn"),
            ("IADD3 R201, R201, R32, RZ", "IADD3 computes the place of a packet in every turn"),
            ("IADD3 R50, R51, R32, RZ\nMOV R202, R50", "IADD3 computes the place of a packet in every turn"),
            ("@P0 MOV R202, R50", "MOV computes the place of a packet in every turn"),
        ] {
            only(&packets_with(second, &format!("{between}\n{second}")), part);
        }
        // Nor where a poll goes on.
        only(&packets_with("@P3 BRA", "IADD3 R201, R201, R32, RZ\n@P3 BRA"), "computes the place of a packet");
        assert_eq!(packets_with(second, &format!("IADD3 R31, R31, R32, RZ\n{second}")), Vec::<String>::new());
        let copied = "IMAD.MOV.U32 R104, RZ, RZ, R202\nMOV R105, R203\nLDG.E.128.STRONG.SYS R104, desc[UR4][R104.64]";
        let place = "LDG.E.128.STRONG.SYS R104, desc[UR4][R202.64]";
        assert_eq!(packets_with(place, copied), Vec::<String>::new());
        // The packs of all ranks in a direct kernel, whose places may be computed where they are.
        only(&direct_with(second, &format!("IADD3 R31, R31, R100, RZ\n{second}")), "waits for a 16-byte load");
        only(&direct_with(second, &format!("BSYNC B0\n{second}")), "parts 16-byte loads");
        assert_eq!(direct_with(second, &format!("IMAD.X R203, RZ, RZ, R32\n{second}")), Vec::<String>::new());
    }

    #[test]
    fn a_sweep_that_is_missing_or_not_at_the_end_is_found() {
        let (clear, conclude) = ("STG.E.128.STRONG.SYS desc[UR4][R28.64], RZ", "BAR.RED.AND.DEFER_BLOCKING 0x0, P0");
        only(&packets_with(clear, "NOP"), "2 stores in 2 loops clear slots, 3 must");
        only(&packets_with(clear, &format!("{clear}\n{clear}")), "4 stores in 3 loops clear slots, 3 must");
        only(&packets_with("@!P0 BRA =sweep_short_1", "NOP"), "3 stores in 2 loops clear slots, 3 must");
        only(&packets_with(conclude, "NOP"), "slots are cleared before the block has concluded");
        only(&packets_with(conclude, &format!("@P0 {conclude}")), "slots are cleared before the block has concluded");
        // Not zeros, or not whole.
        among(&packets_with(clear, &clear.replace("RZ", "R4")), "2 stores in 2 loops clear slots, 3 must");
        among(&packets_with(clear, "STG.E.64.STRONG.SYS desc[UR4][R28.64], RZ"), "2 stores in 2 loops clear slots");
        among(&packets_with(clear, "STG.E.128 desc[UR4][R28.64], RZ"), "without being strong at system scope");
        // In every chunk.
        let chunks = one_shot_by_packets(2).replace("@!P0 BRA =sweep_long", "@!P0 BRA =sweep_long\n@P5 BRA =chunk");
        only(&broken("peersum_one_shot_ll_f32_sum_2", &assembled(&chunks)), "moved behind the clearing of slots");
        let two_shot = broken("peersum_two_shot_ll_f32_sum_2", &assembled(&one_shot_by_packets(2)));
        among(&two_shot, "3 stores in 3 loops clear slots, 2 must");
        among(&with(12, "STG.E.128.STRONG.SYS desc[UR4][R28.64], RZ"), "1 stores in 1 loops clear slots, 0 must");
    }

    #[test]
    fn a_fence_on_the_way_of_packets_is_found() {
        let announcement = "STG.E.64.STRONG.SYS";
        among(&packets_with(announcement, &format!("MEMBAR.ALL.SYS\n{announcement}")), "1 flags are released");
        only(&packets_with("LDG.E R4", "MEMBAR.ALL.SYS\nLDG.E R4"), "a fence that releases no flag");
        // What the claim doesn't come before is not giving up.
        let claim = "ATOMG.E.CAS.STRONG.GPU PT, R14, [R12+0x4], R14, R15";
        only(&packets_with(claim, "NOP"), "a fence that releases no flag");
        only(&packets_with(claim, &format!("@P4 {claim}")), "a fence that releases no flag");
    }

    #[test]
    fn weak_and_narrow_accesses_of_a_direct_kernel_are_found() {
        for (from, to, part) in [
            ("LDG.E.128.STRONG.SYS R104", "LDG.E.128 R104", "LDG.E.128 may find in L1"),
            ("LDG.E.128.STRONG.SYS R104", "LDG.E.128.STRONG.GPU R104", "LDG.E.128.STRONG.GPU is not of system scope"),
            ("LDG.E.128.STRONG.SYS R104", "LDG.E.64.STRONG.SYS R104", "2 packs of 3 ranks are loaded at once"),
            ("LDG.E.128.STRONG.SYS R104", "NOP", "2 packs of 3 ranks are loaded at once"),
            ("LDG.E.U16.STRONG.SYS R101", "LDG.E.U16 R101", "LDG.E.U16 may find in L1"),
            ("LDG.E.U16.STRONG.SYS R101", "NOP", "2 elements are loaded and 1 stored, 3 and 1 must"),
            ("STG.E.128 ", "STG.E.64 ", "of 3 packs of 3 ranks 0 are stored, 1 must of 3"),
            ("STG.E.128 ", "STG.E.128.STRONG.SYS ", "it moves packets"),
            ("STG.E.U16 ", "ST.E.U16 ", "ST.E.U16 goes to a generic address"),
            ("STG.E.U16 ", "ST.E.U16 ", "0 loops store element by element, 1 must"),
        ] {
            among(&direct_with(from, to), part);
        }
        among(&two_shot_direct_with("STG.E.128 ", "NOP "), "of 3 packs of 3 ranks 2 are stored, 3 must of 3");
        among(&two_shot_direct_with("STG.E.U16 ", "NOP "), "3 elements are loaded and 2 stored, 3 and 3 must");
        let one_shot = assembled(&direct_kernel(3, 1));
        among(
            &broken("peersum_two_shot_direct_f16_sum_3", &one_shot),
            "of 3 packs of 3 ranks 1 are stored, 3 must of 3",
        );
        among(&broken("peersum_one_shot_pull_f16_sum_3", &one_shot), "it moves packets");
    }

    #[test]
    fn a_meeting_of_a_direct_kernel_that_orders_too_much_or_too_little_is_found() {
        let (enter, exit) = ("STG.E.64.STRONG.SYS desc[UR4][R6.64], R8", "STG.E.64.STRONG.SYS desc[UR4][R6.64], R10");
        let polls = ["LDG.E.64.STRONG.SYS R10, desc[UR4][R18.64]", "LDG.E.64.STRONG.SYS R10, desc[UR4][R20.64]"];
        for flag in [enter, exit] {
            among(
                &direct_with(flag, &format!("MEMBAR.ALL.SYS\n{flag}")),
                "1 flags are released at system scope, 0 must",
            );
            among(&direct_with(flag, "NOP"), "1 flags are stored without a system fence right before, 2 must");
        }
        for poll in polls {
            among(
                &direct_with(poll, &format!("{poll}\nCCTL.IVALL")),
                "1 flags are polled by loads that acquire, 0 must",
            );
            among(&direct_with(poll, "NOP"), "5 flags are loaded without acquiring, 5 in polls, 6 must");
        }
        only(&direct_with("BAR.SYNC.DEFER_BLOCKING 0x0", "MEMBAR.ALL.SYS\nBAR.SYNC"), "a fence that releases no flag");
        only(&direct_with("BAR.SYNC.DEFER_BLOCKING 0x0", "NOP"), "a flag is stored before all threads have read");
        only(&direct_with("BAR.RED", "NOP"), "a tensor is touched before the block has met the peers");
        among(
            &two_shot_direct_with(enter, &format!("MEMBAR.ALL.SYS\n{enter}")),
            "2 flags are released at system scope, 1 must",
        );
        among(&two_shot_direct_with("MEMBAR.ALL.SYS\n            STG.E.64", "STG.E.64"), "0 flags are released");
        let exit = format!("{}\n            CCTL.IVALL", polls[1]);
        among(&two_shot_direct_with(&exit, polls[1]), "0 flags are polled by loads that acquire, 1 must");
        only(&direct_with("CCTL.IVALL", "NOP")[..1], "1 flags of the other region are acquired, 2 must");
    }

    #[test]
    fn other_paths_to_memory_are_found() {
        only(&with(23, "LDG.E.128.CONSTANT R4, desc[UR4][R4.64]"), "may read what a peer has overwritten");
        only(&packets_with("LDG.E R4", "LDG.E.CONSTANT R4"), "may read what a peer has overwritten");
        only(&with(5, "LD.E R4, desc[UR4][R4.64]"), "generic address");
        only(&with(27, "STL [R1], R0"), "uses local memory");
        only(&packets_with("STG.E.STRONG.SYS desc[UR4][R16.64], R0", "LDL R0, [R1]"), "uses local memory");
        only(&packets_with("LDG.E R4", "LDG.E.STRONG.GPU R4"), "7 epochs are loaded from L2, 6 must");
        only(&packets_with("LDG.E R4", "LDG.E.U16.STRONG.GPU R4"), "not of system scope");
        only(&with(5, "RED.E.ADD.STRONG.SYS [R4.64], R0"), "the one atomic");
    }

    #[test]
    fn places_computed_behind_the_wait_for_the_last_kernel_are_found() {
        let delayed = |count: usize| {
            let computing = repeated(count, |_| "IADD3 R24, R24, R32, RZ".into());
            packets_with("LDG.E R4", &format!("{computing}LDG.E R4"))
        };
        assert_eq!(delayed(BEFORE_THE_FIRST_PACKET - 2), Vec::<String>::new());
        only(
            &delayed(BEFORE_THE_FIRST_PACKET - 1),
            "57 instructions from the wait for the last kernel to a packet, 56 may",
        );
        only(&delayed(200), "202 instructions from the wait for the last kernel to a packet");
        // The long form computes places in its loop.
        let long = repeated(200, |_| "IADD3 R24, R24, R32, RZ".into());
        assert_eq!(packets_with("LDG.E R5", &format!("{long}LDG.E R5")), Vec::<String>::new());
    }

    #[test]
    fn work_before_the_wait_for_the_last_kernel_is_found() {
        let none = with(0, "NOP");
        among(&none, "LDG.E.STRONG.GPU comes before the wait");
        among(&none, "0 waits for the last kernel, 1 must");
        only(&with(0, "@P0 ACQBULK"), "LDG.E.STRONG.GPU comes before the wait");
        among(&with(0, "PREEXIT"), "PREEXIT comes before the wait");
    }

    #[test]
    fn a_fence_among_payload_is_found() {
        among(&with(24, "MEMBAR.ALL.SYS"), "a loop over payload has a fence");
        among(&with(24, "MEMBAR.ALL.SYS"), "a fence that releases no flag");
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
            kernels.extend((2..=8).map(Kernel::gate));
            kernels
        };
        let mut kernels = all(&["sum", "max"]);
        assert_eq!(missing(&kernels, &["f32"]), Vec::<String>::new());
        assert_eq!(missing(&kernels, &["f32", "f16"]).len(), 2 * Algorithm::ALL.len() * 7);
        kernels.pop_first();
        assert_eq!(missing(&kernels, &["f32"]).len(), 1);
    }
}
