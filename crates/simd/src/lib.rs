//! Compiles a loop for several vector instruction sets and picks the widest set of the processor at run time.
//!
//! The binary is built for any processor of its architecture. [`vectorised!`] and [`vectorised_fn!`] compile a loop again for each set of
//! [`Instructions`] and dispatch on [`Instructions::best`]. [`vectorised!`] takes one short loop as an expression;
//! [`vectorised_fn!`] takes a whole function. Code that is not inlined into the loop is compiled for any processor, so
//! functions that the loop calls must be `#[inline(always)]`.
//!
//! Results do not depend on the choice: the compiler reassociates nothing and fuses no multiply-add.
//!
//! ```
//! use shardwright_simd::{vectorised, vectorised_fn};
//!
//! vectorised_fn! {
//!     /// `y += a * x`.
//!     fn axpy[T: Copy + std::ops::Mul<Output = T> + std::ops::AddAssign][T](a: T, x: &[T], y: &mut [T]) {
//!         for (y, &x) in y.iter_mut().zip(x) {
//!             *y += a * x;
//!         }
//!     }
//! }
//!
//! let mut y = vec![1.0; 100];
//! axpy(2.0, &[3.0; 100], &mut y);
//! assert_eq!(y, [7.0; 100]);
//! let largest = vectorised!(y.iter().copied().fold(0.0, f64::max));
//! assert_eq!(largest, 7.0);
//! ```

/// A set of vector instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Instructions {
    /// 512-bit vectors: AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 256-bit vectors: AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The instructions that every processor of the architecture has.
    Common,
}

impl Instructions {
    /// The widest set that this processor has. The standard library caches the answer, so a call costs a few loads.
    #[inline(always)]
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return Self::Avx2;
            }
        }
        Self::Common
    }
}

/// Runs `f`, compiled for [`Instructions::Avx512`] as far as it is inlined.
///
/// # Safety
///
/// The processor must have [`Instructions::Avx512`].
#[doc(hidden)]
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Runs `f`, compiled for [`Instructions::Avx2`] as far as it is inlined.
///
/// # Safety
///
/// The processor must have [`Instructions::Avx2`].
#[doc(hidden)]
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub unsafe fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Runs `f`, compiled for any processor.
#[doc(hidden)]
pub fn with_common<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Evaluates an expression, compiled for the widest vectors of the processor.
///
/// The expression becomes a closure per instruction set, which the compiler inlines if it is short. Longer loops belong into a
/// [`vectorised_fn!`].
#[macro_export]
macro_rules! vectorised {
    ($body:expr) => {
        match $crate::Instructions::best() {
            // SAFETY: `best` has asked the processor, and it has these instructions.
            #[cfg(target_arch = "x86_64")]
            $crate::Instructions::Avx512 => {
                let body = || $body;
                unsafe { $crate::with_avx512(body) }
            }
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            $crate::Instructions::Avx2 => {
                let body = || $body;
                unsafe { $crate::with_avx2(body) }
            }
            _ => $crate::with_common(|| $body),
        }
    };
}

/// Defines a function that is compiled once for each set of [`Instructions`].
///
/// Generics are given twice in brackets, with and without bounds: `fn name[T: Copy][T](x: &[T]) { ... }`; both are empty for a
/// function without. Functions that its loops call must be `#[inline(always)]`, and closures short: code
/// that is not inlined is compiled for any processor.
#[macro_export]
macro_rules! vectorised_fn {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident[$($generics:tt)*][$($names:tt)*]($($arg:ident: $type:ty),* $(,)?) $body:block
    ) => {
        $(#[$meta])*
        $vis fn $name<$($generics)*>($($arg: $type),*) {
            #[inline(always)]
            fn body<$($generics)*>($($arg: $type),*) $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512<$($generics)*>($($arg: $type),*) {
                body::<$($names)*>($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2<$($generics)*>($($arg: $type),*) {
                body::<$($names)*>($($arg),*);
            }
            match $crate::Instructions::best() {
                // SAFETY: `best` has asked the processor, and it has these instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::Instructions::Avx512 => unsafe { avx512::<$($names)*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::Instructions::Avx2 => unsafe { avx2::<$($names)*>($($arg),*) },
                _ => body::<$($names)*>($($arg),*),
            }
        }
    };
}
