//! Enums with the name of their variant in a field (`{"type":"bound", …}`), and the enum of those
//! names.

/// Declares an enum that is written with its variant's name in the field `$tag`, and `$kind`, the
/// enum of the variants' names.
macro_rules! tagged {
    (
        $tag:literal, $kind:ident,
        $(#[$meta:meta])*
        pub enum $name:ident {
            $(
                $(#[$about:meta])*
                $variant:ident $({ $($fields:tt)* })? $(( $($inner:tt)* ))?
            ),* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(serde::Serialize, serde::Deserialize)]
        #[serde(tag = $tag, rename_all = "snake_case")]
        pub enum $name {
            $($(#[$about])* $variant $({ $($fields)* })? $(( $($inner)* ))?),*
        }

        $crate::named::named! {
            #[doc = concat!("The name of each variant of [`", stringify!($name), "`].")]
            pub enum $kind { $($(#[$about])* $variant),* }
        }

        impl $name {
            /// The kind of this variant.
            pub const fn kind(&self) -> $kind {
                match self { $(Self::$variant { .. } => $kind::$variant),* }
            }
        }
    };
}
pub(crate) use tagged;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::{Cause, Event, Phase};

    fn same<T>(text: &str)
    where
        T: serde::de::DeserializeOwned + serde::Serialize + PartialEq + std::fmt::Debug,
    {
        let first: T = serde_json::from_str(text).unwrap();
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_value(&first).unwrap(), value, "{text}");
        // A tree orders its fields by name, so the tag is rarely first.
        assert_eq!(serde_json::from_value::<T>(value).unwrap(), first, "{text}");
        assert_eq!(serde_json::from_slice::<T>(text.as_bytes()).unwrap(), first);
        assert_eq!(
            serde_json::from_reader::<_, T>(text.as_bytes()).unwrap(),
            first
        );
    }

    #[test]
    fn the_field_may_stand_anywhere_and_says_the_same() {
        same::<Event>(r#"{"type":"submitted"}"#);
        same::<Event>(r#"{"type":"paused","who":"a"}"#);
        same::<Event>(r#"{"who":"a","type":"paused"}"#);
        same::<Event>(
            r#"{"computed_until":"2026-11-21T20:21:16.871546Z","cause":{"who":"x","kind":"operator"},"type":"yielded"}"#,
        );
        same::<Cause>(r#"{"kind":"balance"}"#);
        same::<Phase>(r#"{"who":"a","is":"paused"}"#);
        same::<Phase>(
            r#"{"is":"bound","node":"n","instance":"01a1ffc5-16f2-76a0-b3d8-4b134ec30464","substrate":"host","seq":3,"at":"2026-11-21T20:21:16.871546Z"}"#,
        );
    }

    #[test]
    fn what_is_no_such_enum_is_an_error_that_says_why() {
        let said = |text: &str| serde_json::from_str::<Event>(text).unwrap_err().to_string();
        assert!(said("{}").contains("missing field `type`"));
        assert!(said(r#"{"who":"a"}"#).contains("missing field `type`"));
        assert!(said(r#"{"type":"nothing"}"#).contains("unknown variant `nothing`"));
        assert!(said(r#"{"who":"a","type":"nothing"}"#).contains("unknown variant `nothing`"));
        assert!(said(r#"{"type":"paused"}"#).contains("missing field `who`"));
        assert!(said(r#"{"who":"a","who":"b","type":"paused"}"#).contains("duplicate field `who`"));
        assert!(said(r#""paused""#).contains("expected internally tagged enum Event"));
        assert!(serde_json::from_value::<Event>(json!([1])).is_err());
    }
}
