//! Reads what cuobjdump prints about machine code.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
};

/// One kernel's machine code for one architecture.
#[derive(Debug)]
pub(crate) struct Function {
    /// For example "sm_90".
    pub(crate) architecture: String,
    pub(crate) name: String,
    pub(crate) instructions: Vec<Instruction>,
}

/// One instruction.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    pub(crate) address: u64,
    /// Whether a predicate before it can keep it from being done.
    pub(crate) predicated: bool,
    /// With its modifiers, for example "LDG.E.64.STRONG.SYS".
    pub(crate) opcode: String,
    pub(crate) operands: String,
}

impl Instruction {
    /// The opcode without its modifiers.
    pub(crate) fn base(&self) -> &str {
        self.opcode.split('.').next().unwrap_or_default()
    }

    pub(crate) fn has(&self, modifier: &str) -> bool {
        self.opcode.split('.').skip(1).any(|part| part == modifier)
    }

    /// Where a branch goes.
    fn target(&self) -> Option<u64> {
        if self.base() != "BRA" {
            return None;
        }
        self.last_address()
    }

    fn last_address(&self) -> Option<u64> {
        let last = self.operands.split([',', ' ']).rfind(|part| !part.is_empty())?;
        u64::from_str_radix(last.strip_prefix("0x")?, 16).ok()
    }

    fn first_operand(&self) -> &str {
        self.operands.split(',').next().unwrap_or_default().trim()
    }

    /// Whether threads go elsewhere from here, or wait for others to join them. BSSY only says where they will.
    pub(crate) fn is_branch(&self) -> bool {
        matches!(
            self.base(),
            "BRA" | "BRX" | "BRXU" | "JMP" | "JMX" | "JMXU" | "CALL" | "RET" | "EXIT" | "BSYNC" | "BREAK" | "WARPSYNC"
        )
    }

    /// The registers that it writes.
    pub(crate) fn written(&self) -> Range<u32> {
        // It may write predicates too, before or instead.
        let is_predicate = |operand: &&str| operand.starts_with('P') || operand.starts_with("UP");
        if self.base().ends_with("SETP") || self.base() == "PLOP3" {
            return 0..0;
        }
        let first = self.operands.split(',').map(str::trim).find(|operand| !is_predicate(operand));
        let Some(first) = first.and_then(|operand| operand.strip_prefix('R')).and_then(leading_number) else {
            return 0..0;
        };
        let is_wide = ["64", "WIDE", "F64"].iter().any(|modifier| self.has(modifier));
        let is_double = matches!(self.base(), "CS2R" | "DADD" | "DMUL" | "DFMA");
        first..first + if self.has("128") { 4 } else { 1 + u32::from(is_wide || is_double) }
    }

    /// The registers that it reads, of which some may be those that it writes.
    pub(crate) fn read(&self) -> BTreeSet<u32> {
        let mut operands: Vec<_> = self.operands.split(',').collect();
        if !self.written().is_empty() {
            let written = operands.iter().position(|operand| operand.trim().starts_with('R'));
            operands.remove(written.unwrap_or(0));
        }
        operands.into_iter().flat_map(registers).collect()
    }

    /// The registers of the address that it goes to.
    pub(crate) fn address_registers(&self) -> BTreeSet<u32> {
        // `[R4.64+0x10]`, or behind a descriptor.
        let address = self.operands.rsplit_once('[').and_then(|(_, rest)| rest.split_once(']'));
        address.into_iter().flat_map(|(address, _)| registers(address)).collect()
    }
}

/// The registers in a part of the operands: `R4`, `R4.reuse`, and with the next one `R4.64`.
fn registers(text: &str) -> Vec<u32> {
    let parts = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '.');
    parts
        .filter_map(|part| {
            let first = leading_number(part.strip_prefix('R')?)?;
            Some(first..first + if part.ends_with(".64") { 2 } else { 1 })
        })
        .flatten()
        .collect()
}

fn leading_number(text: &str) -> Option<u32> {
    text.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

impl Function {
    /// The loops, from the target of a backward branch to the last branch that goes there.
    pub(crate) fn loops(&self) -> Vec<&[Instruction]> {
        let mut ends = BTreeMap::new();
        for (index, instruction) in self.instructions.iter().enumerate() {
            // A branch to itself is the padding behind the code.
            if let Some(target) = instruction.target().filter(|target| *target < instruction.address) {
                ends.insert(target, index);
            }
        }
        ends.into_iter()
            .map(|(target, end)| {
                let start = self.instructions.partition_point(|instruction| instruction.address < target);
                &self.instructions[start..=end]
            })
            .collect()
    }

    /// The loops around such an instruction that contain no other such loop.
    pub(crate) fn smallest_loops_with(&self, wanted: impl Fn(&Instruction) -> bool) -> Vec<&[Instruction]> {
        let loops: Vec<_> = self.loops().into_iter().filter(|body| body.iter().any(&wanted)).collect();
        loops.iter().copied().filter(|outer| !loops.iter().any(|inner| inside(inner, outer))).collect()
    }

    /// Whether each instruction can be reached from the start without one that `stops`; or why nobody can tell.
    ///
    /// What it takes for possible may be more than what is: a call goes to what it calls and on, a join of threads on, or
    /// where any of the forks goes that it may belong to.
    pub(crate) fn reachable_without(&self, stops: impl Fn(&Instruction) -> bool) -> Result<Vec<bool>, String> {
        self.reachable_from(if self.instructions.is_empty() { vec![] } else { vec![0] }, stops)
    }

    /// The same from these instructions, by their index.
    pub(crate) fn reachable_from(
        &self,
        mut todo: Vec<usize>,
        stops: impl Fn(&Instruction) -> bool,
    ) -> Result<Vec<bool>, String> {
        let mut reached = vec![false; self.instructions.len()];
        while let Some(index) = todo.pop() {
            if std::mem::replace(&mut reached[index], true) {
                continue;
            }
            let instruction = &self.instructions[index];
            if instruction.predicated || !stops(instruction) {
                todo.extend(self.successors(index)?);
            }
        }
        Ok(reached)
    }

    /// The fewest instructions that lie between the one of this index and one that is `wanted`, if it can be reached.
    pub(crate) fn fewest_between(
        &self,
        from: usize,
        wanted: impl Fn(&Instruction) -> bool,
    ) -> Result<Option<usize>, String> {
        let mut seen = vec![false; self.instructions.len()];
        let mut todo: VecDeque<_> = self.successors(from)?.into_iter().map(|next| (next, 0)).collect();
        while let Some((index, between)) = todo.pop_front() {
            if std::mem::replace(&mut seen[index], true) {
                continue;
            }
            if wanted(&self.instructions[index]) {
                return Ok(Some(between));
            }
            todo.extend(self.successors(index)?.into_iter().map(|next| (next, between + 1)));
        }
        Ok(None)
    }

    fn successors(&self, index: usize) -> Result<Vec<usize>, String> {
        let instruction = &self.instructions[index];
        let unknown = || format!("{} {} goes nobody knows where", instruction.opcode, instruction.operands);
        let at = |address| self.instructions.binary_search_by_key(&address, |one| one.address).map_err(|_| unknown());
        let next = Some(index + 1).filter(|next| *next < self.instructions.len());
        // `@P0 BRA 0x10`, `BRA P1, 0x10`, `BRA.U UP0, 0x10`, `BRA.DIV UR4, 0x10`.
        let conditional = instruction.predicated || instruction.operands.contains([',']);
        let mut successors = Vec::new();
        match instruction.base() {
            "EXIT" | "RET" => successors.extend(next.filter(|_| instruction.predicated)),
            "BRA" => {
                successors.push(at(instruction.target().ok_or_else(unknown)?)?);
                successors.extend(next.filter(|_| conditional));
            }
            "CALL" => {
                successors.push(at(instruction.last_address().ok_or_else(unknown)?)?);
                successors.extend(next);
            }
            "WARPSYNC" => {
                // The mask alone, or the mask and where to wait for it.
                if let Some(target) = instruction.last_address().and_then(|address| at(address).ok()) {
                    successors.push(target);
                }
                successors.extend(next);
            }
            "BSYNC" => {
                let forks = self
                    .instructions
                    .iter()
                    .filter(|one| one.base() == "BSSY" && one.first_operand() == instruction.first_operand());
                let joins: Vec<u64> = forks.filter_map(Instruction::last_address).collect();
                let behind = next.map(|next| self.instructions[next].address);
                if !behind.is_some_and(|behind| joins.contains(&behind)) {
                    for join in joins {
                        successors.push(at(join)?);
                    }
                }
                successors.extend(next);
            }
            "BRX" | "BRXU" | "JMP" | "JMX" | "JMXU" => return Err(unknown()),
            _ => successors.extend(next),
        }
        Ok(successors)
    }

    /// The loops that contain no other loop.
    pub(crate) fn innermost_loops(&self) -> Vec<&[Instruction]> {
        self.smallest_loops_with(|_| true)
    }
}

/// Whether a loop lies in another one.
pub(crate) fn inside(inner: &[Instruction], outer: &[Instruction]) -> bool {
    let (inner, outer) = (inner.as_ptr_range(), outer.as_ptr_range());
    inner != outer && outer.start <= inner.start && inner.end <= outer.end
}

/// The functions in the output of `cuobjdump -sass`.
pub(crate) fn functions(output: &str) -> Vec<Function> {
    let mut functions: Vec<Function> = Vec::new();
    let mut architecture = "";
    for line in output.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("code for ") {
            architecture = name;
        } else if let Some(name) = line.strip_prefix("Function : ") {
            functions.push(Function {
                architecture: architecture.to_owned(),
                name: name.to_owned(),
                instructions: Vec::new(),
            });
        } else if let (Some(function), Some(instruction)) = (functions.last_mut(), instruction(line)) {
            function.instructions.push(instruction);
        }
    }
    functions
}

/// An instruction such as `/*0760*/  @P0 BRA 0x7b0 ;  /* 0x... */`. Lines with the encoding alone are none.
fn instruction(line: &str) -> Option<Instruction> {
    let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    let address = u64::from_str_radix(address, 16).ok()?;
    let (text, _) = rest.split_once(';')?;
    let mut text = text.trim();
    let predicated = text.starts_with('@');
    if predicated {
        text = text.split_once(' ')?.1.trim_start();
    }
    let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
    Some(Instruction { address, predicated, opcode: opcode.to_owned(), operands: operands.trim().to_owned() })
}

/// Bytes of stack by (architecture, function) in the output of `cuobjdump -res-usage`.
pub(crate) fn stacks(output: &str) -> BTreeMap<(String, String), u64> {
    let mut stacks = BTreeMap::new();
    let (mut architecture, mut function) = ("", "");
    for line in output.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("arch = ") {
            architecture = name;
        } else if let Some(name) = line.strip_prefix("Function ") {
            function = name.trim_end_matches(':');
        } else if let Some(bytes) = line.split(' ').find_map(|part| part.strip_prefix("STACK:")) {
            stacks.insert((architecture.to_owned(), function.to_owned()), bytes.parse().expect("a number of bytes"));
        }
    }
    stacks
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "
Fatbin elf code:
================
arch = sm_90
code version = [1,8]

\tcode for sm_90
\t.target\tsm_90

\t\tFunction : peersum_a
\t.headerflags\t@\"EF_CUDA_SM90\"
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000ff00000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R4.64] ; /* 0x0 */
        /*0020*/               @P0 BRA P1, 0x10 ;                  /* 0x0 */
        /*0030*/                   ERRBAR;                         /* 0x0 */
        /*0040*/               @P0 BRA 0x0 ;                       /* 0x0 */
        /*0050*/                   EXIT ;                          /* 0x0 */
        /*0060*/                   BRA 0x60;                       /* 0x0 */
\t\tFunction : peersum_b
        /*0000*/                   EXIT ;                          /* 0x0 */
";

    #[test]
    fn functions_and_their_instructions_are_read() {
        let functions = functions(OUTPUT);
        let names: Vec<_> = functions.iter().map(|function| (&*function.architecture, &*function.name)).collect();
        assert_eq!(names, [("sm_90", "peersum_a"), ("sm_90", "peersum_b")]);
        let opcodes: Vec<_> = functions[0].instructions.iter().map(|instruction| &*instruction.opcode).collect();
        assert_eq!(opcodes, ["LDC", "LDG.E.128", "BRA", "ERRBAR", "BRA", "EXIT", "BRA"]);
        let load = &functions[0].instructions[1];
        assert_eq!((load.address, &*load.operands), (0x10, "R4, desc[UR4][R4.64]"));
        assert!(load.base() == "LDG" && load.has("128") && !load.has("12"));
    }

    #[test]
    fn loops_are_found_and_the_padding_is_none() {
        let functions = functions(OUTPUT);
        let ranges = |loops: Vec<&[Instruction]>| -> Vec<_> {
            loops.iter().map(|body| (body[0].address, body.last().unwrap().address)).collect()
        };
        assert_eq!(ranges(functions[0].loops()), [(0x0, 0x40), (0x10, 0x20)]);
        assert_eq!(ranges(functions[0].innermost_loops()), [(0x10, 0x20)]);
        assert!(functions[1].loops().is_empty());
    }

    /// The addresses that are reached in a function of these instructions, without its "STOP".
    fn reached(code: &[&str]) -> Result<Vec<u64>, String> {
        let mut listing = String::from("code for sm_90\nFunction : peersum_a\n");
        for (index, line) in code.iter().enumerate() {
            listing += &format!("/*{:04x}*/ {line} ; /* 0x0 */\n", index * 16);
        }
        let function = &functions(&listing)[0];
        let reached = function.reachable_without(|instruction| instruction.base() == "STOP")?;
        let reached = function.instructions.iter().zip(reached).filter(|(_, reached)| *reached);
        Ok(reached.map(|(instruction, _)| instruction.address).collect())
    }

    #[test]
    fn paths_follow_branches_and_end_at_stops() {
        assert_eq!(reached(&["NOP", "STOP", "NOP"]).unwrap(), [0x0, 0x10]);
        assert_eq!(reached(&["@P0 STOP", "EXIT", "NOP"]).unwrap(), [0x0, 0x10]);
        assert_eq!(reached(&["BRA 0x20", "NOP", "@P0 EXIT", "EXIT", "NOP"]).unwrap(), [0x0, 0x20, 0x30]);
        assert_eq!(reached(&["BRA.U UP0, 0x20", "STOP", "EXIT"]).unwrap(), [0x0, 0x10, 0x20]);
        assert_eq!(reached(&["@P0 BRA 0x20", "STOP", "EXIT"]).unwrap(), [0x0, 0x10, 0x20]);
        assert_eq!(
            reached(&["CALL.REL.NOINC 0x30", "STOP", "NOP", "RET.REL.NODEC R2 0x0"]).unwrap(),
            [0x0, 0x10, 0x30]
        );
    }

    #[test]
    fn the_shortest_way_is_found() {
        let between = |code: &[&str]| {
            let mut listing = String::from("code for sm_90\nFunction : peersum_a\n");
            for (index, line) in code.iter().enumerate() {
                listing += &format!("/*{:04x}*/ {line} ; /* 0x0 */\n", index * 16);
            }
            functions(&listing)[0].fewest_between(0, |instruction| instruction.base() == "STOP")
        };
        assert_eq!(between(&["NOP", "STOP"]).unwrap(), Some(0));
        assert_eq!(between(&["NOP", "@P0 BRA 0x40", "NOP", "NOP", "STOP"]).unwrap(), Some(1));
        assert_eq!(between(&["STOP", "NOP", "NOP", "STOP"]).unwrap(), Some(2));
        assert_eq!(between(&["STOP", "EXIT", "STOP"]).unwrap(), None);
        assert!(between(&["NOP", "BRX R2 -0x10", "STOP"]).is_err());
    }

    #[test]
    fn registers_are_read() {
        let one = |text: &str| instruction(&format!("/*0000*/ {text} ;")).unwrap();
        assert_eq!(one("IMAD.X R31, R25, 0x1, R39.reuse, P0").written(), 31..32);
        assert_eq!(one("LDG.E.128.STRONG.SYS R4, desc[UR4][R8.64+0x1000]").written(), 4..8);
        assert_eq!(one("@P0 LDG.E.64.STRONG.SYS R4, desc[UR4][R8.64]").written(), 4..6);
        assert_eq!(one("IMAD.WIDE.U32 R56, R21, R4, RZ").written(), 56..58);
        assert_eq!(one("LOP3.LUT P4, R7, R71, R80, RZ, 0xc0, !PT").written(), 7..8);
        assert_eq!(one("IADD3 R72, P2, P4, R43, R34, R40").written(), 72..73);
        for none in ["ISETP.NE.AND P5, PT, R68, R41, PT", "STG.E.128 desc[UR4][R6.64], R8", "R2UR UR4, R86", "BRA 0x10"]
        {
            assert!(one(none).written().is_empty(), "{none}");
        }
        let read = |text: &str| one(text).read().into_iter().collect::<Vec<_>>();
        assert_eq!(read("IMAD.X R31, R25, 0x1, R39.reuse, P0"), [25, 39]);
        assert_eq!(read("LOP3.LUT R62, R62, R41, R27, 0xf6, !PT"), [27, 41, 62]);
        assert_eq!(read("LDG.E.128.STRONG.SYS R4, desc[UR14][R8.64+0x1000]"), [8, 9]);
        assert_eq!(read("ISETP.NE.AND P5, PT, R68, -R41, PT"), [41, 68]);
        assert_eq!(read("STG.E.128 desc[UR4][R6.64], R10"), [6, 7, 10]);
        let address = |text: &str| one(text).address_registers().into_iter().collect::<Vec<_>>();
        assert_eq!(address("LDG.E.128.STRONG.SYS R4, desc[UR14][R8.64+0x1000]"), [8, 9]);
        assert_eq!(address("STG.E.128 desc[UR4][R6.64], R10"), [6, 7]);
        assert_eq!(address("LDG.E.64 R10, [R12.64]"), [12, 13]);
    }

    #[test]
    fn joined_threads_go_on_behind_the_join_or_where_the_fork_says() {
        assert_eq!(reached(&["BSSY B0, 0x20", "BSYNC B0", "EXIT", "NOP"]).unwrap(), [0x0, 0x10, 0x20]);
        let elsewhere = ["BSSY B0, 0x40", "BSYNC B0", "STOP", "NOP", "EXIT"];
        assert_eq!(reached(&elsewhere).unwrap(), [0x0, 0x10, 0x20, 0x40]);
    }

    #[test]
    fn a_branch_that_nobody_can_follow_is_an_error() {
        for branch in ["BRX R2 -0x10", "BRA 0x1000", "CALL.ABS.NOINC R2"] {
            assert!(reached(&[branch, "EXIT"]).unwrap_err().contains("goes nobody knows where"), "{branch}");
        }
    }

    #[test]
    fn stacks_are_read() {
        let output = "arch = sm_80\n\nResource usage:\n Common:\n  GLOBAL:0\n Function a:\n  REG:64 STACK:0 SHARED:0\n \
                      Function b:\n  REG:40 STACK:16 SHARED:0\narch = sm_90\n Function a:\n  REG:40 STACK:8 SHARED:0\n";
        let stacks: Vec<_> = stacks(output).into_iter().collect();
        let key = |architecture: &str, name: &str| (architecture.to_owned(), name.to_owned());
        assert_eq!(stacks, [(key("sm_80", "a"), 0), (key("sm_80", "b"), 16), (key("sm_90", "a"), 8)]);
    }
}
