//! Every instruction set of this processor gives the bits of the plain loop.

use shardwright_simd::{Instructions, vectorised, vectorised_fn};

/// `out[i] = a[i] * b[i] + 1`, and the sum of `a` into `total`.
#[inline(always)]
fn plain(a: &[f32], b: &[f32], out: &mut [f32], total: &mut f32) {
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = a * b + 1.0;
    }
    *total = a.iter().sum();
}

vectorised_fn! {
    /// [`plain`], dispatched.
    fn dispatched[][](a: &[f32], b: &[f32], out: &mut [f32], total: &mut f32) {
        plain(a, b, out, total);
    }
}

vectorised_fn! {
    /// Doubles every element.
    fn double[T: Copy + std::ops::Add<Output = T>, const N: usize][T, N](x: &mut [T; N]) {
        for x in x {
            *x = *x + *x;
        }
    }
}

fn numbers(salt: u32) -> Vec<f32> {
    (0..1001u32).map(|i| (i.wrapping_mul(7919 + salt) % 1013) as f32 / 31.0 - 13.0).collect()
}

#[test]
fn every_instruction_set_gives_the_plain_bits() {
    let (a, b) = (numbers(1), numbers(2));
    let (mut expected, mut sum) = (vec![0.0; a.len()], 0.0);
    plain(&a, &b, &mut expected, &mut sum);
    let same = |out: &[f32], total: f32| {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(
            (bits(out), total.to_bits()),
            (bits(&expected), sum.to_bits()),
            "{:?}",
            Instructions::best()
        );
    };
    let (mut out, mut total) = (vec![0.0; a.len()], 0.0);
    dispatched(&a, &b, &mut out, &mut total);
    same(&out, total);
    vectorised!(plain(&a, &b, &mut out, &mut total));
    same(&out, total);
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has just been asked.
        unsafe { shardwright_simd::with_avx2(|| plain(&a, &b, &mut out, &mut total)) };
        same(&out, total);
    }
    shardwright_simd::with_common(|| plain(&a, &b, &mut out, &mut total));
    same(&out, total);
}

#[test]
fn generic_functions_are_dispatched_too() {
    let mut x = [1i64, -2, 3];
    double(&mut x);
    assert_eq!(x, [2, -4, 6]);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn the_best_set_is_one_that_the_processor_has() {
    match Instructions::best() {
        Instructions::Avx512 => assert!(is_x86_feature_detected!("avx512vl")),
        Instructions::Avx2 => {
            assert!(is_x86_feature_detected!("avx2") && !is_x86_feature_detected!("avx512vl"))
        }
        _ => assert!(!is_x86_feature_detected!("avx2")),
    }
}
