//! Run-time choice between a body compiled with AVX2 and FMA and the same body without.
//!
//! Why: without the `fma` target feature `f64::mul_add` becomes a call into libm, tens of times
//! slower. Both compilations give the same bits, because a fused multiply-add is correctly
//! rounded everywhere and no body reorders its operations; tests compare them.

/// The instruction set a kernel runs with. A wide value exists only where the CPU has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simd {
    level: Level,
}

/// The width of the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The target's baseline.
    Portable,
    /// AVX2 and FMA on x86-64.
    Avx2,
    /// AVX-512 on x86-64, where a kernel has a variant for it.
    Avx512,
}

impl Simd {
    /// The best that this CPU offers.
    #[must_use]
    pub fn detect() -> Self {
        Self::at_most(Level::Avx512)
    }

    /// The best that this CPU offers up to a level; the same bits.
    #[must_use]
    pub fn at_most(limit: Level) -> Self {
        #[cfg(target_arch = "x86_64")]
        let found = if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("fma") {
            Level::Portable
        } else if is_x86_feature_detected!("avx512f") {
            Level::Avx512
        } else {
            Level::Avx2
        };
        #[cfg(not(target_arch = "x86_64"))]
        let found = Level::Portable;
        Self {
            level: found.min(limit),
        }
    }

    /// The target's baseline; the same bits, slower on x86-64.
    #[must_use]
    pub const fn portable() -> Self {
        Self {
            level: Level::Portable,
        }
    }

    /// The width in use. It is above portable only after detection.
    #[must_use]
    pub const fn level(self) -> Level {
        self.level
    }

    /// Whether AVX2 and FMA are used. True only after detection.
    #[must_use]
    pub const fn is_wide(self) -> bool {
        !matches!(self.level, Level::Portable)
    }
}

/// Defines `fn name(simd, args…)` around an `#[inline(always)]` body.
///
/// Everything that the body calls must be inlined too, or its `mul_add` falls back to libm.
macro_rules! dispatched {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path) => {
        $(#[$meta])*
        $vis fn $name(simd: $crate::simd::Simd, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                if simd.is_wide() {
                    // SAFETY: a wide `Simd` is made by `detect` alone, after the CPU reported
                    // both features that `wide` is compiled with.
                    #[allow(unsafe_code)]
                    return unsafe { wide($($arg),*) };
                }
            }
            let _ = simd;
            $body($($arg),*)
        }
    };
}
pub(crate) use dispatched;
