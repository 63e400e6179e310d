//! Enums whose variants are names. In JSON, subjects, SQL and metrics, a variant is its name in
//! snake case. The list of variants is the only list of the names.

/// A text that is not the name of a variant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is none of {}", known.join(", "))]
pub struct UnknownName {
    /// The text.
    pub name: String,
    /// The known names.
    pub known: Vec<&'static str>,
}

/// Declares an enum of names, with serde, a JSON Schema, `ALL`, `as_str`, `Display` and `FromStr`.
macro_rules! named {
    (
        $(#[$meta:meta])*
        pub enum $name:ident { $($(#[$about:meta])* $variant:ident),* $(,)? }
    ) => {
        $(#[$meta])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash,
            serde::Serialize, serde::Deserialize, schemars::JsonSchema,
        )]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$about])* $variant),* }

        impl $name {
            /// All variants, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name in JSON, SQL and metrics.
            pub const fn as_str(self) -> &'static str {
                use $crate::named::{snake_case, snake_length, text};
                match self {
                    $(Self::$variant => {
                        const NAME: &str = stringify!($variant);
                        const SNAKE: [u8; snake_length(NAME)] = snake_case(NAME);
                        const { text(&SNAKE) }
                    })*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::named::UnknownName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let found = Self::ALL.iter().find(|known| known.as_str() == text);
                found.copied().ok_or_else(|| $crate::named::UnknownName {
                    name: text.to_owned(),
                    known: Self::ALL.iter().map(|known| known.as_str()).collect(),
                })
            }
        }
    };
}
pub(crate) use named;

/// The length of a variant's name in snake case.
pub(crate) const fn snake_length(name: &str) -> usize {
    let bytes = name.as_bytes();
    let (mut length, mut at) = (0, 0);
    while at < bytes.len() {
        length += 1 + (at > 0 && bytes[at].is_ascii_uppercase()) as usize;
        at += 1;
    }
    length
}

/// A variant's name in snake case, as serde writes it.
pub(crate) const fn snake_case<const N: usize>(name: &str) -> [u8; N] {
    let bytes = name.as_bytes();
    let (mut snake, mut to, mut at) = ([0; N], 0, 0);
    while at < bytes.len() {
        if at > 0 && bytes[at].is_ascii_uppercase() {
            snake[to] = b'_';
            to += 1;
        }
        snake[to] = bytes[at].to_ascii_lowercase();
        to += 1;
        at += 1;
    }
    snake
}

/// The name as text. A variant's name is ASCII.
pub(crate) const fn text(snake: &[u8]) -> &str {
    match std::str::from_utf8(snake) {
        Ok(text) => text,
        Err(_) => "",
    }
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use crate::messages::{
        BatchVerb, ExecutionVerb, NodeEventKind, NodeVerb, RefusalCode, StandingKind,
        VerificationOutcome, Viability,
    };
    use crate::substrate::SubstrateKind;
    use crate::{CauseKind, EventKind, PhaseKind};

    fn agree<T: Copy + PartialEq + std::fmt::Debug + Serialize + DeserializeOwned>(
        all: &[T],
        name: fn(T) -> &'static str,
        read: fn(&str) -> Option<T>,
    ) {
        for one in all {
            let json = serde_json::to_value(one).unwrap();
            assert_eq!(json, name(*one));
            assert_eq!(serde_json::from_value::<T>(json).unwrap(), *one);
            assert_eq!(read(name(*one)), Some(*one));
        }
    }

    macro_rules! agree {
        ($($kind:ident),*) => {
            $(agree($kind::ALL, $kind::as_str, |text| text.parse().ok());)*
        };
    }

    #[test]
    fn a_name_is_the_same_in_json_and_elsewhere() {
        agree!(
            EventKind,
            PhaseKind,
            CauseKind,
            ExecutionVerb,
            BatchVerb,
            NodeVerb,
            RefusalCode,
            NodeEventKind,
            VerificationOutcome,
            Viability,
            StandingKind,
            SubstrateKind
        );
        assert_eq!(EventKind::SteppedBack.as_str(), "stepped_back");
        assert_eq!(format!("{:>8}", PhaseKind::Bound), "   bound");
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "rest".parse::<BatchVerb>().unwrap_err().to_string();
        assert_eq!(
            error,
            r#""rest" is none of status, cancel, pause, resume, retry"#
        );
    }
}
