//! Parses an enum with its variant in a field (`{"type":"bound", …}`) directly.
//!
//! Serde's own parser of such enums first copies the whole object into a tree, because the field
//! might come last. It copies again for each such enum inside. All our writers put the field first,
//! so the rest of the object can be parsed into the variant directly. If the field comes later, the
//! tree is used, with the same result.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, MapDeserializer, StrDeserializer};
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, EnumAccess, Error, IgnoredAny, MapAccess,
    VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::{Map, Value};

/// Declares an enum that is written with its variant's name in the field `$tag`, and parsed as this
/// module describes. `$remote` is the enum's own name as a string. With `$kind` it also declares
/// the enum of the variants' names.
macro_rules! tagged {
    (
        $tag:literal, $remote:literal, $kind:ident,
        $(#[$meta:meta])*
        pub enum $name:ident {
            $(
                $(#[$about:meta])*
                $variant:ident $({ $($fields:tt)* })? $(( $($inner:tt)* ))?
            ),* $(,)?
        }
    ) => {
        $crate::tagged::tagged! { $tag, $remote,
            $(#[$meta])*
            pub enum $name {
                $($(#[$about])* $variant $({ $($fields)* })? $(( $($inner)* ))?),*
            }
        }

        $crate::named::named! {
            #[doc = concat!("The name of each variant of [`", $remote, "`].")]
            pub enum $kind { $($(#[$about])* $variant),* }
        }

        impl $name {
            /// The kind of this variant.
            pub const fn kind(&self) -> $kind {
                match self { $(Self::$variant { .. } => $kind::$variant),* }
            }
        }
    };
    ($tag:literal, $remote:literal, $(#[$meta:meta])* pub enum $name:ident { $($body:tt)* }) => {
        $(#[$meta])*
        #[derive(serde::Serialize)]
        #[serde(tag = $tag, rename_all = "snake_case")]
        pub enum $name { $($body)* }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                // The same variants, parsed with the name outside the object.
                #[derive(serde::Deserialize)]
                #[serde(remote = $remote, rename_all = "snake_case")]
                #[allow(dead_code)]
                enum Outside { $($body)* }

                struct Read($name);
                impl<'de> serde::Deserialize<'de> for Read {
                    fn deserialize<D: serde::Deserializer<'de>>(
                        deserializer: D,
                    ) -> Result<Self, D::Error> {
                        Outside::deserialize(deserializer).map(Self)
                    }
                }
                $crate::tagged::read::<Read, D>($tag, deserializer).map(|read| read.0)
            }
        }
    };
}
pub(crate) use tagged;

/// Parses `T`, an enum with the variant's name outside, from an object that has the name in `tag`.
pub(crate) fn read<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    tag: &'static str,
    deserializer: D,
) -> Result<T, D::Error> {
    deserializer.deserialize_map(Object {
        tag,
        is: PhantomData,
    })
}

struct Object<T> {
    tag: &'static str,
    is: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the field `{}`", self.tag)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let Some(Text(key)) = map.next_key()? else {
            return Err(A::Error::missing_field(self.tag));
        };
        if key == self.tag {
            let Text(variant) = map.next_value()?;
            return T::deserialize(Variant {
                name: &variant,
                fields: map,
            });
        }
        let mut fields = Map::new();
        fields.insert(key.into_owned(), map.next_value()?);
        while let Some((key, value)) = map.next_entry::<String, Value>()? {
            if fields.insert(key, value).is_some() {
                return Err(A::Error::custom("a field stands twice"));
            }
        }
        let Some(Value::String(variant)) = fields.remove(self.tag) else {
            return Err(A::Error::missing_field(self.tag));
        };
        T::deserialize(Variant {
            name: &variant,
            fields: MapDeserializer::<_, serde_json::Error>::new(fields.into_iter()),
        })
        .map_err(A::Error::custom)
    }
}

/// A text that is borrowed if the source allows it.
struct Text<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }

            fn visit_string<E>(self, text: String) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text)))
            }
        }
        deserializer.deserialize_str(Any)
    }
}

struct Variant<'v, A> {
    name: &'v str,
    fields: A,
}

impl<'de, A: MapAccess<'de>> Deserializer<'de> for Variant<'_, A> {
    type Error = A::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, A::Error> {
        visitor.visit_enum(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier
        ignored_any
    }
}

impl<'de, A: MapAccess<'de>> EnumAccess<'de> for Variant<'_, A> {
    type Error = A::Error;
    type Variant = Fields<A>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Fields<A>), A::Error> {
        let name = seed.deserialize(StrDeserializer::new(self.name))?;
        Ok((name, Fields(self.fields)))
    }
}

struct Fields<A>(A);

impl<'de, A: MapAccess<'de>> VariantAccess<'de> for Fields<A> {
    type Error = A::Error;

    fn unit_variant(mut self) -> Result<(), A::Error> {
        while self.0.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, A::Error> {
        seed.deserialize(MapAccessDeserializer::new(self.0))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, A::Error> {
        Err(A::Error::custom(
            "a variant of several values has no names for them",
        ))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        visitor.visit_map(self.0)
    }
}

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
        assert!(said(r#"{"who":"a","who":"b","type":"paused"}"#).contains("twice"));
        assert!(said(r#""paused""#).contains("an object with the field `type`"));
        assert!(serde_json::from_value::<Event>(json!([1])).is_err());
    }
}
