//! Settings of a policy in a trace: those that differ from their defaults. A replay has today's
//! defaults for the rest.

use fiec_policy::Config;
use serde_json::{Map, Value};

macro_rules! settings {
    ($($name:ident)*) => {
        /// The settings that differ from their defaults.
        ///
        /// # Errors
        /// If JSON cannot hold a value.
        pub fn changed(config: &Config) -> Result<Map<String, Value>, serde_json::Error> {
            // Without `..`, so that a new setting is listed below.
            let Config { discipline, $($name),* } = config;
            let default = Config::default();
            let mut changed = Map::new();
            if *discipline != default.discipline {
                let name = discipline.as_str().to_owned();
                changed.insert("discipline".to_owned(), Value::String(name));
            }
            $(if *$name != default.$name {
                changed.insert(stringify!($name).to_owned(), serde_json::to_value($name)?);
            })*
            Ok(changed)
        }

        /// Today's defaults with these changes.
        ///
        /// # Errors
        /// The setting that is not known, or has a value of another type.
        pub fn config(changed: Map<String, Value>) -> Result<Config, String> {
            let mut config = Config::default();
            for (name, value) in changed {
                let bad = |error: &dyn std::fmt::Display| format!("setting {name}: {error}");
                match name.as_str() {
                    "discipline" => {
                        let text = value.as_str().unwrap_or_default();
                        config.discipline = text.parse().map_err(|error: String| bad(&error))?;
                    }
                    $(stringify!($name) => {
                        config.$name = serde_json::from_value(value).map_err(|error| bad(&error))?;
                    })*
                    _ => return Err(bad(&"the policy has none of this name")),
                }
            }
            Ok(config)
        }
    };
}

settings! {
    liveness_ms forget_ms stall_ms take_ms take_busy_ms balance_ms holdings_ms holdings_confirm_ms heal_ms
    grace_ms order_grace_ms order_retry_ms order_repeat_ms leave_margin_ms tell_ms give_up_ms
    replica_ms avoid_ms start_retry_ms start_retry_longest_ms deadly_workers
    horizon_ms queue_ms ahead_per_completion ahead_limit residency_floor_ms
    reserve_ms gang_ms gang_keep_ms quota_grace_ms look_ms vanished_ms burst preempt slicing
    slice_ms preempt_residency_ms preempt_residency_moves preempt_review_ms ageing_ms half_life_ms
    reallocate reallocate_residency_ms upgrade_dwell_ms device_bound spread_look_ms spread_dwell_ms
    spread_least_ms spread_moves spread_answer_ms node_keys verify_share verify_at_once
    verify_retry_ms verify_silence_ms
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_policy::share::order::Discipline;
    use serde_json::json;

    #[test]
    fn only_what_differs_from_the_defaults_is_written_and_read_back() {
        assert!(changed(&Config::default()).unwrap().is_empty());
        let config_of_a_test = Config {
            tell_ms: 0,
            discipline: Discipline::Fifo,
            verify_share: 0.5,
            ..Config::default()
        };
        let map = changed(&config_of_a_test).unwrap();
        let expected = json!({"discipline": "fifo", "tell_ms": 0, "verify_share": 0.5});
        assert_eq!(Value::Object(map.clone()), expected);
        assert_eq!(config(map).unwrap(), config_of_a_test);
        let unknown = json!({"colour": 1}).as_object().unwrap().clone();
        assert!(config(unknown).unwrap_err().contains("colour"));
    }
}
