//! Element types as flags name them.

use clap::ValueEnum;
use peersum::DType;

/// One, or all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TypeChoice {
    #[value(alias = "f32")]
    Float,
    #[value(alias = "f16")]
    Half,
    #[value(alias = "bf16")]
    Bfloat16,
    All,
}

/// What is named, each once, in the order of the names.
pub(crate) fn dtypes(choices: &[TypeChoice]) -> Vec<DType> {
    once_each(choices.iter().flat_map(|choice| match choice {
        TypeChoice::Float => vec![DType::F32],
        TypeChoice::Half => vec![DType::F16],
        TypeChoice::Bfloat16 => vec![DType::BF16],
        TypeChoice::All => DType::ALL.to_vec(),
    }))
}

/// The values without doubles, in their order.
pub(crate) fn once_each<T: PartialEq>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut unique = Vec::new();
    for value in values {
        if !unique.contains(&value) {
            unique.push(value);
        }
    }
    unique
}
