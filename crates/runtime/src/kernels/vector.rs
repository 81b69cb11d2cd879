//! What the kernels that work on contiguous rows share: wide vectors where the machine has them, and sums.

use crate::tensor::Float;

/// The sets of vector instructions that loops are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What every machine of the architecture has.
    Common,
}

impl Instructions {
    /// The best of this machine. The standard library caches the answers; asking costs a few loads.
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

/// Runs `f`, which is compiled for these instructions if it is inlined.
///
/// # Safety
///
/// The machine must have [`Instructions::Avx512`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Runs `f`, which is compiled for these instructions if it is inlined.
///
/// # Safety
///
/// The machine must have [`Instructions::Avx2`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Runs `f`, compiled for any machine.
pub(crate) fn with_common<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Evaluates an expression, compiled for the widest vectors that the machine has.
///
/// The binary is built for any machine of its architecture; loops in the expression are compiled once more
/// for each set of [`Instructions`], if they are inlined. So this is for one short loop; longer ones are
/// [`vectorised_fn`]s. Results do not depend on the choice: nothing is reassociated and no multiply-add is
/// fused.
macro_rules! vectorised {
    ($body:expr) => {
        match $crate::kernels::vector::Instructions::best() {
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::vector::Instructions::Avx512 => {
                let body = || $body;
                // SAFETY: the machine has these instructions.
                unsafe { $crate::kernels::vector::with_avx512(body) }
            }
            #[cfg(target_arch = "x86_64")]
            $crate::kernels::vector::Instructions::Avx2 => {
                let body = || $body;
                // SAFETY: the machine has these instructions.
                unsafe { $crate::kernels::vector::with_avx2(body) }
            }
            $crate::kernels::vector::Instructions::Common => $crate::kernels::vector::with_common(|| $body),
        }
    };
}
pub(crate) use vectorised;

/// Defines a function that is compiled once for each set of [`Instructions`]; its generics are given twice,
/// with and without bounds. What its loops call must be `inline(always)`, and closures short: whatever is
/// not inlined is compiled for any machine.
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
            match $crate::kernels::vector::Instructions::best() {
                // SAFETY: the machine has these instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::vector::Instructions::Avx512 => unsafe {
                    avx512::<$($names)*>($($arg),*);
                },
                // SAFETY: the machine has these instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::vector::Instructions::Avx2 => unsafe { avx2::<$($names)*>($($arg),*) },
                $crate::kernels::vector::Instructions::Common => body::<$($names)*>($($arg),*),
            }
        }
    };
}
pub(crate) use vectorised_fn;

/// Independent partial results: enough to fill the vector registers of any machine.
pub(crate) const LANES: usize = 16;

/// Adds up lanes pairwise, which loses less than adding them one after the other.
#[inline(always)]
fn join<T: Float>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for k in 0..width {
            lanes[k] += lanes[k + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of a row.
#[inline(always)]
pub(crate) fn sum<T: Float>(x: &[T]) -> T {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [T::ZERO; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    rest.iter().fold(join(lanes), |sum, &x| sum + x)
}

/// Elements that are worked on at a time where results are needed only for their sum: writing them down
/// first keeps the loop that makes them simple enough to be vectorised.
pub(crate) const STRIP: usize = 128;

/// `y = exp(x - m)` for a row.
#[inline(always)]
pub(crate) fn exp_less<T: Float>(x: &[T], m: T, y: &mut [T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = (x - m).exp();
    }
}

/// The sum of `exp(x - m)` over a row.
#[inline(always)]
pub(crate) fn sum_exp<T: Float>(x: &[T], m: T) -> T {
    let mut strip = [T::ZERO; STRIP];
    let mut total = T::ZERO;
    for x in x.chunks(STRIP) {
        let strip = &mut strip[..x.len()];
        exp_less(x, m, strip);
        total += sum(strip);
    }
    total
}

/// The sum of `x * y` over two rows of the same length.
#[inline(always)]
pub(crate) fn dot<T: Float>(x: &[T], y: &[T]) -> T {
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let mut lanes = [T::ZERO; LANES];
    for (xs, ys) in xs.iter().zip(ys) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(xs).zip(ys) {
            *lane += x * y;
        }
    }
    x_rest.iter().zip(y_rest).fold(join(lanes), |sum, (&x, &y)| sum + x * y)
}

/// The largest element of a row; minus infinity if there is none.
#[inline(always)]
pub(crate) fn largest<T: Float>(x: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [T::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    rest.iter().chain(&lanes).fold(T::NEG_INFINITY, |a, &b| larger(a, b))
}
