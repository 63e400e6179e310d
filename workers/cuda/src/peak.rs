//! The peak rate of a device, for comparison with measured rates.

use crate::found::Found;

/// FP64 operations per second at most, by fused multiply-adds outside tensor cores. None if the
/// driver does not report the clock. The units per multiprocessor by compute capability come from
/// the CUDA C++ Programming Guide (throughput of native arithmetic instructions).
#[must_use]
pub fn fp64_peak(found: &Found) -> Option<f64> {
    let units = match found.capability {
        (6, 0) | (7, 0) | (8, 0) => 32,
        (9, 0) | (10, 0) => 64,
        (6 | 7, _) => 4,
        _ => 2,
    };
    let units = match found.capability {
        (7, 5) => 2,
        (7, 2) => 32,
        _ => units,
    };
    let (units, multiprocessors) = (f64::from(units), f64::from(found.multiprocessors));
    let clock = f64::from(found.clock_khz) * 1e3;
    (clock > 0.0).then_some(2.0 * units * multiprocessors * clock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_known_devices_is_that_of_their_data_sheets() {
        let of = |capability, multiprocessors, clock_khz| {
            fp64_peak(&Found {
                ordinal: 0,
                uuid: String::new(),
                name: String::new(),
                memory_bytes: 0,
                capability,
                multiprocessors,
                clock_khz,
                driver: 13_000,
            })
        };
        let about = |found: Option<f64>, sheet: f64| (found.unwrap() / sheet - 1.0).abs() < 0.02;
        assert!(about(of((8, 0), 108, 1_410_000), 9.7e12), "A100");
        assert!(about(of((9, 0), 132, 1_980_000), 33.5e12), "H100 SXM");
        assert!(about(of((7, 0), 80, 1_530_000), 7.8e12), "V100 SXM2");
        assert_eq!(of((9, 0), 132, 0), None);
    }
}
