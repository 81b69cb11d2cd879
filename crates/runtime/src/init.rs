//! Initial values of weights, data and constants. They are pure functions of seed, tensor name and element index, so
//! any device can compute its block of a tensor and every plan starts from the same state.

use crate::tensor::{Data, HostTensor};
use half::{bf16, f16};
use shardwright_graph::{Block, Init, MASTER_SUFFIX, Tensor, block};

/// Mixes 64 bits so that every input bit reaches every output bit (the finaliser of SplitMix64).
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The stream of random numbers of one tensor.
#[derive(Clone, Copy)]
struct Stream(u64);

impl Stream {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a over the name: stable across versions and platforms.
        let name = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        Self(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ name)
    }

    fn bits(self, index: u64, draw: u64) -> u64 {
        mix(self.0.wrapping_add(mix(index.wrapping_mul(2).wrapping_add(draw).wrapping_add(1))))
    }

    /// Uniform over 0..1, never exactly 0.
    fn uniform(self, index: u64, draw: u64) -> f64 {
        ((self.bits(index, draw) >> 11) as f64 + 0.5) * (1.0 / (1u64 << 53) as f64)
    }

    fn draw(self, init: Init, index: u64) -> f64 {
        match init {
            Init::Constant(value) => value.0,
            Init::Uniform(bound) => (2.0 * self.uniform(index, 0) - 1.0) * bound.0,
            Init::Normal(deviation) => {
                // Box and Muller.
                let radius = (-2.0 * self.uniform(index, 0).ln()).sqrt();
                radius * (std::f64::consts::TAU * self.uniform(index, 1)).cos() * deviation.0
            }
            Init::Below(limit) => (self.bits(index, 0) % limit.max(1)) as f64,
        }
    }
}

/// A copy whose floats are moved to a neighbouring float, up or down by `seed`; zeros, infinities and NaN stay.
pub(crate) fn nudged(value: &HostTensor, seed: u64) -> HostTensor {
    // For finite numbers other than zero, the next larger and smaller bit patterns are the neighbours.
    macro_rules! moved {
        ($kind:ident, $x:expr, $t:ty) => {
            Data::$kind(
                $x.iter()
                    .enumerate()
                    .map(|(i, x)| match mix(seed ^ i as u64) & 1 {
                        _ if !x.is_finite() || *x == <$t>::default() => *x,
                        0 => <$t>::from_bits(x.to_bits() + 1),
                        _ => <$t>::from_bits(x.to_bits() - 1),
                    })
                    .collect(),
            )
        };
    }
    let data = match value.data() {
        Data::F32(x) => moved!(F32, x, f32),
        Data::F64(x) => moved!(F64, x, f64),
        Data::Bf16(x) => moved!(Bf16, x, bf16),
        Data::F16(x) => moved!(F16, x, f16),
        whole => whole.clone(),
    };
    HostTensor::new(value.shape().clone(), data)
}

/// The initial value of a tensor that no op produces.
pub fn initial_value(seed: u64, tensor: &Tensor) -> HostTensor {
    initial_block(seed, tensor, &block::whole(&tensor.ty.shape))
}

/// A block of a tensor's initial value, equal to that block of [`initial_value`].
pub fn initial_block(seed: u64, tensor: &Tensor, block: &Block) -> HostTensor {
    // A master copy starts as the weight that it is the copy of.
    let name = tensor.name.strip_suffix(MASTER_SUFFIX).unwrap_or(&tensor.name);
    let stream = Stream::new(seed, name);
    let init = tensor.init.unwrap_or(Init::Constant(shardwright_graph::Real(0.0)));
    let shape = &tensor.ty.shape;
    let count = block::elements(block) as usize;
    let mut values = Vec::with_capacity(count);
    let mut index = block::start(block);
    for _ in 0..count {
        let flat = index.iter().zip(shape.iter()).fold(0u64, |flat, (i, n)| flat * n + i);
        values.push(stream.draw(init, flat));
        for d in (0..index.len()).rev() {
            index[d] += 1;
            if index[d] < block[d].end {
                break;
            }
            index[d] = block[d].start;
        }
    }
    HostTensor::new(block::extents(block), Data::of_reals(tensor.ty.dtype, values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::{DType, Real, Role, TensorType};
    use smallvec::SmallVec;

    fn tensor(init: Init, shape: [u64; 2]) -> Tensor {
        let ty = TensorType::new(DType::F64, shape);
        Tensor { name: "w".into(), ty, role: Role::Parameter, producer: None, init: Some(init) }
    }

    #[test]
    fn a_block_equals_that_block_of_the_whole() {
        let t = tensor(Init::Normal(Real(1.0)), [6, 10]);
        let whole = initial_value(7, &t).to_f64_vec();
        let block = initial_block(7, &t, &SmallVec::from_vec(vec![2..5, 3..10])).to_f64_vec();
        let expected: Vec<f64> = (2..5).flat_map(|i| whole[i * 10 + 3..i * 10 + 10].to_vec()).collect();
        assert_eq!(block, expected);
    }

    #[test]
    fn distributions_have_their_moments() {
        let check = |init, mean: f64, variance: f64| {
            let x = initial_value(3, &tensor(init, [200, 500])).to_f64_vec();
            let n = x.len() as f64;
            let m = x.iter().sum::<f64>() / n;
            let v = x.iter().map(|x| (x - m) * (x - m)).sum::<f64>() / n;
            assert!((m - mean).abs() < 0.02 * variance.sqrt(), "{init:?}: mean {m}");
            assert!((v / variance - 1.0).abs() < 0.02, "{init:?}: variance {v}");
        };
        check(Init::Normal(Real(2.0)), 0.0, 4.0);
        check(Init::Uniform(Real(3.0)), 0.0, 3.0);
        check(Init::Below(10), 4.5, 8.25);
    }
}
