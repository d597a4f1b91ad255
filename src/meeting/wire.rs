//! Values as bytes, for what ranks tell each other.

/// A value that can be told to another process.
///
/// Taking one back from bytes of unknown origin allocates no more than there are bytes.
pub(crate) trait Wire: Sized {
    /// Appends the value.
    fn put(&self, out: &mut Vec<u8>);

    /// Takes a value off the front; `None` if there is none.
    fn take(from: &mut &[u8]) -> Option<Self>;

    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.put(&mut out);
        out
    }

    /// From all of `bytes`, with nothing left over.
    fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let value = Self::take(&mut bytes)?;
        bytes.is_empty().then_some(value)
    }
}

/// Takes so many bytes off the front.
fn take_bytes<'a>(from: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(count)?;
    *from = rest;
    Some(taken)
}

macro_rules! number {
    ($($number:ty)*) => {$(
        impl Wire for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }

            fn take(from: &mut &[u8]) -> Option<Self> {
                take_bytes(from, size_of::<$number>())?.try_into().ok().map(<$number>::from_le_bytes)
            }
        }
    )*};
}
number!(u8 u16 u32 u64);

impl Wire for () {
    fn put(&self, _: &mut Vec<u8>) {}

    fn take(_: &mut &[u8]) -> Option<Self> {
        Some(())
    }
}

impl<const N: usize> Wire for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        take_bytes(from, N)?.try_into().ok()
    }
}

/// As 0 or 1.
impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        match u8::take(from)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl Wire for usize {
    fn put(&self, out: &mut Vec<u8>) {
        (*self as u64).put(out);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        u64::take(from)?.try_into().ok()
    }
}

/// With their number before them.
impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        self.iter().for_each(|value| value.put(out));
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let count = u32::take(from)? as usize;
        // Values without bytes can't be more either, so that a number alone keeps nobody busy.
        if count > from.len() {
            return None;
        }
        (0..count).map(|_| T::take(from)).collect()
    }
}

impl Wire for String {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend(self.as_bytes());
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let count = u32::take(from)? as usize;
        String::from_utf8(take_bytes(from, count)?.to_vec()).ok()
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::take(from)? { Some(T::take(from)?) } else { None })
    }
}

/// With a word of why there is none.
impl<T: Wire> Wire for Result<T, String> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_ok().put(out);
        match self {
            Ok(value) => value.put(out),
            Err(reason) => reason.put(out),
        }
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::take(from)? { Ok(T::take(from)?) } else { Err(String::take(from)?) })
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some((A::take(from)?, B::take(from)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn values_survive_their_bytes(bytes: Vec<u8>, text: String, numbers: Vec<u32>, number: u64) {
            prop_assert_eq!(Vec::<u8>::from_bytes(&bytes.to_bytes()), Some(bytes));
            prop_assert_eq!(String::from_bytes(&text.to_bytes()), Some(text));
            prop_assert_eq!(Vec::<u32>::from_bytes(&numbers.to_bytes()), Some(numbers));
            prop_assert_eq!(u64::from_bytes(&number.to_bytes()), Some(number));
            let nested = vec![(number as usize, None), (0, Some(true))];
            prop_assert_eq!(Vec::<(usize, Option<bool>)>::from_bytes(&nested.to_bytes()), Some(nested));
        }

        #[test]
        fn any_bytes_are_a_value_or_none(bytes: Vec<u8>) {
            let whole = |value: Option<Vec<u8>>| value.is_none_or(|value| value == bytes);
            prop_assert!(whole(String::from_bytes(&bytes).map(|value| value.to_bytes())));
            prop_assert!(whole(Vec::<u8>::from_bytes(&bytes).map(|value| value.to_bytes())));
            prop_assert!(whole(Vec::<u32>::from_bytes(&bytes).map(|value| value.to_bytes())));
            type Nested = Vec<(Option<u8>, Result<bool, String>)>;
            prop_assert!(whole(Nested::from_bytes(&bytes).map(|value| value.to_bytes())));
            prop_assert!(whole(<[u8; 7]>::from_bytes(&bytes).map(|value| value.to_bytes())));
        }
    }

    #[test]
    fn a_length_beyond_the_bytes_allocates_nothing() {
        assert_eq!(Vec::<u8>::from_bytes(&u32::MAX.to_le_bytes()), None);
        assert_eq!(Vec::<u32>::from_bytes(&u32::MAX.to_le_bytes()), None);
        assert_eq!(String::from_bytes(&[1, 0, 0, 0, 0xff]), None);
        assert_eq!(Vec::<()>::from_bytes(&u32::MAX.to_le_bytes()), None);
        assert_eq!(u32::from_bytes(&[0; 5]), None);
    }
}
