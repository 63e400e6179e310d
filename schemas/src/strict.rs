//! Strict parsing of objects. A derived parser also accepts a list for a struct, with the values in
//! the order of the fields: `[0.9, 0.5, 1]` would pass for a threshold. [`Strict`] refuses that for
//! every struct, and every variant with fields, at any depth.

use serde::Deserializer;
use serde::de::value::{MapDeserializer, SeqDeserializer, StrDeserializer};
use serde::de::{
    DeserializeSeed, EnumAccess, Error as _, IntoDeserializer, VariantAccess, Visitor,
};
use serde_json::{Error, Value};

/// A JSON value for a parser that accepts only objects for structs.
#[derive(Debug, Clone, Copy)]
pub struct Strict<'de>(pub &'de Value);

impl<'de> IntoDeserializer<'de, Error> for Strict<'de> {
    type Deserializer = Self;
    fn into_deserializer(self) -> Self {
        self
    }
}

/// The error for a list where an object is expected.
fn no_list() -> Error {
    Error::custom("must be an object, but is a list")
}

impl<'de> Deserializer<'de> for Strict<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(list) => {
                let mut items = SeqDeserializer::new(list.iter().map(Strict));
                let value = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(value)
            }
            Value::Object(map) => {
                let fields = map.iter().map(|(key, value)| (key.as_str(), Strict(value)));
                let mut fields = MapDeserializer::new(fields);
                let value = visitor.visit_map(&mut fields)?;
                fields.end()?;
                Ok(value)
            }
            scalar => scalar.deserialize_any(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if self.0.is_array() {
            return Err(no_list());
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Value::Object(map) if map.len() == 1 => match map.iter().next() {
                Some((variant, value)) => visitor.visit_enum(Variant(variant, value)),
                None => Err(Error::custom("an empty object names no variant")),
            },
            // A name alone, or a value that is no variant.
            other => other.deserialize_enum(name, variants, visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

/// `{"variant": value}`.
struct Variant<'de>(&'de str, &'de Value);

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = Error;
    type Variant = Strict<'de>;

    fn variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<(S::Value, Strict<'de>), Error> {
        let name: StrDeserializer<'_, Error> = self.0.into_deserializer();
        Ok((seed.deserialize(name)?, Strict(self.1)))
    }
}

impl<'de> VariantAccess<'de> for Strict<'de> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        serde::Deserialize::deserialize(self)
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if self.0.is_array() {
            return Err(no_list());
        }
        self.deserialize_any(visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::{Deserialize, Serialize};
    use serde_json::json;
    use std::collections::BTreeMap;

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[serde(default)]
        a: f64,
        #[serde(default)]
        b: u64,
    }

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    enum Choice {
        Unit,
        New(Inner),
        Tuple(i64, bool),
        Fields { n: u32, inner: Option<Inner> },
    }

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Newtype(i64);

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Outer {
        id: Option<String>,
        map: BTreeMap<String, Inner>,
        list: Vec<Inner>,
        choices: Vec<Choice>,
        pair: (u8, String),
        new: Newtype,
        any: Value,
    }

    fn inner() -> impl Strategy<Value = Inner> {
        (-1e9..1e9f64, any::<u64>()).prop_map(|(a, b)| Inner { a, b })
    }

    fn choice() -> impl Strategy<Value = Choice> {
        prop_oneof![
            Just(Choice::Unit),
            inner().prop_map(Choice::New),
            any::<(i64, bool)>().prop_map(|(n, b)| Choice::Tuple(n, b)),
            (any::<u32>(), proptest::option::of(inner()))
                .prop_map(|(n, inner)| Choice::Fields { n, inner }),
        ]
    }

    fn outer() -> impl Strategy<Value = Outer> {
        let map = proptest::collection::btree_map("[a-z]{1,4}", inner(), 0..3);
        let list = proptest::collection::vec(inner(), 0..3);
        let choices = proptest::collection::vec(choice(), 0..4);
        let id = proptest::option::of("[a-z]{0,4}");
        let rest = (any::<u8>(), "[a-z]{0,3}", any::<i64>());
        (id, map, list, choices, rest).prop_map(|(id, map, list, choices, (x, y, z))| Outer {
            id,
            map,
            list,
            choices,
            pair: (x, y),
            new: Newtype(z),
            any: json!([[1, null], {"k": [true]}]),
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_as_the_plain_reader_reads_it(outer in outer()) {
            let value = serde_json::to_value(&outer).unwrap();
            prop_assert_eq!(Outer::deserialize(Strict(&value)).unwrap(), outer.clone());
            prop_assert_eq!(serde_json::from_value::<Outer>(value).unwrap(), outer);
        }
    }

    #[test]
    fn a_list_is_refused_wherever_an_object_is_expected_though_the_plain_reader_takes_it() {
        fn refused<T: serde::de::DeserializeOwned + std::fmt::Debug>(value: &Value) {
            serde_json::from_str::<T>(&value.to_string()).expect("a derived reader takes it");
            let error = T::deserialize(Strict(value)).unwrap_err().to_string();
            assert_eq!(error, "must be an object, but is a list");
        }
        refused::<Inner>(&json!([0.5, 1]));
        refused::<Inner>(&json!([]));
        refused::<Vec<Inner>>(&json!([{"a": 1.0}, [0.5, 1]]));
        refused::<BTreeMap<String, Inner>>(&json!({"x": [0.5, 1]}));
        refused::<Option<Inner>>(&json!([0.5]));
        refused::<Choice>(&json!({"New": [0.5, 1]}));
        refused::<Choice>(&json!({"Fields": [7, null]}));
        refused::<Choice>(&json!({"Fields": {"n": 7, "inner": [0.5]}}));
    }

    #[test]
    fn lists_stay_lists_and_wrong_types_stay_errors() {
        let list: Vec<u32> = Vec::deserialize(Strict(&json!([1, 2]))).unwrap();
        assert_eq!(list, [1, 2]);
        for wrong in [json!("Fields"), json!({"Unit": 1}), json!([]), json!({})] {
            assert!(Choice::deserialize(Strict(&wrong)).is_err(), "{wrong}");
        }
        let error = Inner::deserialize(Strict(&json!({"c": 1}))).unwrap_err();
        assert!(error.to_string().contains("unknown field `c`"), "{error}");
    }
}
