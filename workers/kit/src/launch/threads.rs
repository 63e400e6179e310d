//! How many threads the libraries of a program compute with. The order of a sum, and so its bits,
//! depends on their number, which these libraries take from the processors of the node. So it is set
//! for them: to what the submission says, or else to one.

use super::Values;

/// OpenMP's, which the others read as well.
const ALL: &str = "OMP_NUM_THREADS";
/// Those of OpenMP, OpenBLAS, MKL, BLIS and numexpr.
const COUNTS: [&str; 5] = [
    ALL,
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
];
/// With them a library would use fewer threads than it is told, where there are fewer processors.
const FIXED: [(&str, &str); 2] = [("OMP_DYNAMIC", "FALSE"), ("MKL_DYNAMIC", "FALSE")];

/// Whether a variable says how many threads compute.
pub(super) fn is_count(name: &str) -> bool {
    COUNTS.contains(&name) || FIXED.iter().any(|(fixed, _)| *fixed == name)
}

/// The variables that say how many threads compute, without those that the submission sets itself.
pub fn counts(values: &Values) -> impl Iterator<Item = (String, String)> {
    let count = values.get(ALL).unwrap_or("1").to_owned();
    let counts = COUNTS.iter().map(move |name| (*name, count.clone()));
    let fixed = FIXED
        .iter()
        .map(|(name, value)| (*name, (*value).to_owned()));
    let all = counts.chain(fixed);
    all.filter(|(name, _)| values.get(name).is_none())
        .map(|(name, value)| (name.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    use super::super::Rules;

    fn seen(values: &Values, name: &str) -> Option<String> {
        let mut command = Command::new("env");
        Rules::default().prepare(&mut command, None, values);
        let mut all = command.get_envs();
        let (_, value) = all.find(|(seen, _)| *seen == name)?;
        Some(value?.to_str().unwrap().to_owned())
    }

    fn values(all: &[(&str, &str)]) -> Values {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).into());
        all.iter().map(owned).collect()
    }

    #[test]
    fn one_thread_computes_unless_the_submission_says_more() {
        let none = values(&[]);
        let four = values(&[("OMP_NUM_THREADS", "4"), ("MKL_NUM_THREADS", "2")]);
        for (name, one, more) in [
            ("OMP_NUM_THREADS", "1", "4"),
            ("OPENBLAS_NUM_THREADS", "1", "4"),
            ("MKL_NUM_THREADS", "1", "2"),
            ("MKL_DYNAMIC", "FALSE", "FALSE"),
        ] {
            assert_eq!(seen(&none, name).as_deref(), Some(one), "{name}");
            assert_eq!(seen(&four, name).as_deref(), Some(more), "{name}");
        }
    }
}
