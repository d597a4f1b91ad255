//! Reads what cuobjdump prints about machine code.

use std::collections::BTreeMap;

/// One kernel's machine code for one architecture.
#[derive(Debug)]
pub(crate) struct Function {
    /// For example "sm_90".
    pub(crate) architecture: String,
    pub(crate) name: String,
    pub(crate) instructions: Vec<Instruction>,
}

/// One instruction, without its predicate.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    pub(crate) address: u64,
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
        let last = self.operands.split([',', ' ']).rfind(|part| !part.is_empty())?;
        u64::from_str_radix(last.strip_prefix("0x")?, 16).ok()
    }
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

    /// The loops that contain no other loop.
    pub(crate) fn innermost_loops(&self) -> Vec<&[Instruction]> {
        let loops = self.loops();
        let inside = |inner: &[Instruction], outer: &[Instruction]| {
            let (inner, outer) = (inner.as_ptr_range(), outer.as_ptr_range());
            inner != outer && outer.start <= inner.start && inner.end <= outer.end
        };
        loops.iter().copied().filter(|outer| !loops.iter().any(|inner| inside(inner, outer))).collect()
    }
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
    if text.starts_with('@') {
        text = text.split_once(' ')?.1.trim_start();
    }
    let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
    Some(Instruction { address, opcode: opcode.to_owned(), operands: operands.trim().to_owned() })
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

    #[test]
    fn stacks_are_read() {
        let output = "arch = sm_80\n\nResource usage:\n Common:\n  GLOBAL:0\n Function a:\n  REG:64 STACK:0 SHARED:0\n \
                      Function b:\n  REG:40 STACK:16 SHARED:0\narch = sm_90\n Function a:\n  REG:40 STACK:8 SHARED:0\n";
        let stacks: Vec<_> = stacks(output).into_iter().collect();
        let key = |architecture: &str, name: &str| (architecture.to_owned(), name.to_owned());
        assert_eq!(stacks, [(key("sm_80", "a"), 0), (key("sm_80", "b"), 16), (key("sm_90", "a"), 8)]);
    }
}
