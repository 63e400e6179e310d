//! The metrics of a service for `/metrics`, each declared once.

/// Declares a struct of metrics. A field's name is the metric's name after the prefix, and its
/// comment is the help text. `= value` replaces the type's default. Fields in `beside` are no
/// metrics.
#[macro_export]
macro_rules! figures {
    (
        $(#[$meta:meta])*
        $vis:vis struct $Name:ident in $prefix:literal {
            $( $(#[doc = $help:literal])+ $field:ident: $type:ty $(= $value:expr)?, )*
        }
        $( beside { $( $(#[$beside_meta:meta])* $beside:ident: $beside_type:ty, )* } )?
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone)]
        $vis struct $Name {
            $( $(#[doc = $help])+ $vis $field: $type, )*
            $( $( $(#[$beside_meta])* $vis $beside: $beside_type, )* )?
        }

        impl Default for $Name {
            fn default() -> Self {
                Self {
                    $( $field: $crate::figures!(@default $($value)?), )*
                    $( $( $beside: Default::default(), )* )?
                }
            }
        }

        impl $Name {
            /// Makes the figures known under their prefix.
            $vis fn register(
                &self,
                registry: &mut $crate::prometheus_client::registry::Registry,
            ) {
                let registry = registry.sub_registry_with_prefix($prefix);
                $( registry.register(
                    stringify!($field),
                    $crate::figures::help(concat!($($help),+)),
                    self.$field.clone(),
                ); )*
            }
        }
    };
    (@default) => { Default::default() };
    (@default $value:expr) => { $value };
}

/// Converts a comment to a help text: without its leading space and its full stop, which the
/// registry adds.
#[doc(hidden)]
pub fn help(comment: &str) -> &str {
    let comment = comment.trim();
    comment.strip_suffix('.').unwrap_or(comment)
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::registry::Registry;

    figures! {
        struct Some in "some" {
            /// Things that were
            /// counted.
            things: Counter,
            /// Levels.
            level: Gauge = {
                let level = Gauge::default();
                level.set(7);
                level
            },
        }
        beside { other: u8, }
    }

    #[test]
    fn a_declaration_gives_names_help_and_defaults() {
        let figures = Some::default();
        figures.things.inc();
        assert_eq!(figures.other, 0);
        let mut registry = Registry::default();
        figures.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines.contains(&"# HELP some_things Things that were counted."),
            "{text}"
        );
        assert!(lines.contains(&"some_things_total 1"), "{text}");
        assert!(lines.contains(&"some_level 7"), "{text}");
    }
}
