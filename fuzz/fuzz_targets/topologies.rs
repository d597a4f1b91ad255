//! The command's parsers of topologies: the text of `nvidia-smi topo -m`, NCCL's topology files, configuration spaces.
//! They are the command's own, which has no library, so its module is taken in by its path.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)]
#[path = "../../cli/src/topology/mod.rs"]
mod topology;

use topology::{acs::Acs, matrix::Matrix, smi, xml};

fuzz_target!(|bytes: &[u8]| {
    Acs::of_config(bytes);
    // A space has 4096 bytes, which nobody guesses; what is there comes where the list of capabilities begins.
    let mut config = vec![0; 4096];
    let end = bytes.len().min(4096 - 0x100);
    config[0x100..0x100 + end].copy_from_slice(&bytes[..end]);
    Acs::of_config(&config);
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok((matrix, _)) = smi::parse(text) {
        // What one says of the other, the other says of the one.
        for (a, row) in matrix.cells.iter().enumerate() {
            row.iter().enumerate().for_each(|(b, cell)| assert_eq!(*cell, matrix.cells[b][a]));
        }
    }
    if let Ok(machine) = xml::parse(text) {
        let matrix = Matrix::of(&machine);
        // What is read can be written, and is the same then; devices without a class of their own are not written.
        let again = xml::parse(&xml::write(&machine)).expect("what was written is read");
        if again.gpus.len() == machine.gpus.len() && again.nics == machine.nics {
            assert_eq!(Matrix::of(&again).cells.len(), matrix.cells.len());
        }
    }
});
