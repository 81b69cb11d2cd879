//! Resize: each output position is a weighted sum of input positions, one dimension at a time.

use super::{
    Import,
    rearrange::{pick, weighted},
};
use crate::{
    error::{NodeError, NodeResult},
    fold::axis_of,
    importer::Importer,
    proto::Node,
    storage::{MOST_FOLDED, sizes},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Resize" => resize,
        _ => return None,
    })
}

/// How Resize maps an output position to input positions.
struct Sampling {
    transform: String,
    mode: Interpolation,
    /// Whether positions outside the input are excluded.
    inside: bool,
    /// Whether windows widen by the factor by which the input shrinks (antialiasing).
    smooth: bool,
}

/// The interpolation of an output position.
enum Interpolation {
    /// The nearest input position, with this rounding.
    Nearest(String),
    Linear,
    /// Keys' cubic interpolation with this coefficient.
    Cubic(f64),
}

impl Sampling {
    fn position(&self, i: u64, scale: f64, input: u64, rounded: u64) -> NodeResult<f64> {
        // The output length before rounding down.
        let (i, input, output) = (i as f64, input as f64, scale * input as f64);
        Ok(match self.transform.as_str() {
            "half_pixel" => (i + 0.5) / scale - 0.5,
            "pytorch_half_pixel" if output > 1.0 => (i + 0.5) / scale - 0.5,
            "pytorch_half_pixel" => 0.0,
            "align_corners" if output > 1.0 => i * (input - 1.0) / (output - 1.0),
            "align_corners" => 0.0,
            "asymmetric" => i / scale,
            "half_pixel_symmetric" => {
                let centre = input / 2.0 * (1.0 - rounded as f64 / output);
                centre + (i + 0.5) / scale - 0.5
            }
            other => return Err(NodeError::unsupported(format!("coordinates `{other}`"))),
        })
    }

    /// The weight of an input position at this distance.
    fn kernel(&self, d: f64) -> f64 {
        match self.mode {
            Interpolation::Cubic(a) if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
            Interpolation::Cubic(a) => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
            _ => 1.0 - d,
        }
    }

    /// The input positions of an output position, with their weights.
    fn weights(&self, x: f64, scale: f64, input: u64) -> Vec<(u64, f64)> {
        let last = input as f64 - 1.0;
        let place = |x: f64| x.clamp(0.0, last) as u64;
        if let Interpolation::Nearest(rounding) = &self.mode {
            let rounded = match rounding.as_str() {
                "round_prefer_ceil" => (x + 0.5).floor(),
                "floor" => x.floor(),
                "ceil" => x.ceil(),
                _ => (x - 0.5).ceil(),
            };
            return vec![(place(rounded), 1.0)];
        }
        let reach = if matches!(self.mode, Interpolation::Cubic(_)) { 2.0 } else { 1.0 };
        // If the input shrinks, an antialiasing window covers more positions.
        let widened = if self.smooth { scale.min(1.0) } else { 1.0 };
        let (first, end) = ((x - reach / widened).floor() as i64, (x + reach / widened).ceil() as i64);
        let mut taps = Vec::new();
        for i in first..=end {
            let distance = (i as f64 - x).abs() * widened;
            let outside = i < 0 || i as f64 > last;
            if distance < reach && !(self.inside && outside) {
                taps.push((place(i as f64), self.kernel(distance)));
            }
        }
        let sum: f64 = taps.iter().map(|(_, w)| w).sum();
        if (self.inside || self.smooth) && sum != 0.0 {
            taps.iter_mut().for_each(|(_, w)| *w /= sum);
        }
        taps
    }
}

fn resize(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let mut x = cx.view(node, 0)?;
    let mode = match node.text("mode", "nearest")?.as_str() {
        "nearest" => Interpolation::Nearest(node.text("nearest_mode", "round_prefer_floor")?),
        "linear" => Interpolation::Linear,
        "cubic" => Interpolation::Cubic(node.float("cubic_coeff_a", -0.75)?),
        other => return Err(NodeError::unsupported(format!("mode `{other}`"))),
    };
    let sampling = Sampling {
        transform: node.text("coordinate_transformation_mode", "half_pixel")?,
        mode,
        inside: node.flag("exclude_outside", false)?,
        smooth: node.flag("antialias", false)?,
    };
    let axes = match node.ints("axes")? {
        Some(axes) => axes.iter().map(|&a| axis_of(a, x.rank())).collect::<NodeResult<Vec<_>>>()?,
        None => (0..x.rank()).collect(),
    };
    let shape = x.shape();
    let mut given =
        if cx.given(node, 3) { Some(sizes(cx.known(node, 3, "sizes")?.as_ints()?)?) } else { None };
    let policy = node.text("keep_aspect_ratio_policy", "stretch")?;
    let scales = match &mut given {
        Some(sizes) if sizes.len() == axes.len() && policy != "stretch" => {
            // One scale for all dimensions: the smallest or the largest that fits.
            let scales = axes.iter().zip(&*sizes).map(|(&d, &s)| s as f64 / shape[d] as f64);
            let scale = match policy.as_str() {
                "not_larger" => scales.fold(f64::INFINITY, f64::min),
                "not_smaller" => scales.fold(0.0, f64::max),
                other => return Err(NodeError::invalid(format!("unknown aspect ratio policy `{other}`"))),
            };
            for (&d, size) in axes.iter().zip(sizes) {
                *size = (scale * shape[d] as f64 + 0.5).floor() as u64;
            }
            vec![scale; axes.len()]
        }
        Some(sizes) if sizes.len() == axes.len() => {
            axes.iter().zip(&*sizes).map(|(&d, &s)| s as f64 / shape[d] as f64).collect()
        }
        Some(_) => return Err(NodeError::invalid("the sizes do not match the axes")),
        None => cx.known(node, 2, "scales")?.to_reals(),
    };
    if scales.len() != axes.len() || scales.iter().any(|s| !s.is_finite() || *s <= 0.0) {
        return Err(NodeError::invalid(format!("scales {scales:?} do not fit the input")));
    }
    for (i, (&dim, &scale)) in axes.iter().zip(&scales).enumerate() {
        let input = shape[dim];
        let output = given.as_ref().map_or_else(|| (input as f64 * scale).floor() as u64, |sizes| sizes[i]);
        if output == 0 || output.saturating_mul(input) > MOST_FOLDED as u64 {
            return Err(NodeError::unsupported(format!("{input} positions resized to {output}")));
        }
        let mut weights = Vec::with_capacity(output as usize);
        for o in 0..output {
            weights.push(sampling.weights(sampling.position(o, scale, input, output)?, scale, input));
        }
        let stays = |(o, w): (usize, &Vec<(u64, f64)>)| *w == [(o as u64, 1.0)];
        if input == output && weights.iter().enumerate().all(stays) {
            continue;
        }
        x = match sampling.mode {
            Interpolation::Nearest(_) => pick(cx, &x, dim, weights.iter().map(|w| w[0].0 as i64).collect())?,
            _ => weighted(cx, "", &x, dim, &weights)?,
        };
    }
    cx.output_view(node, 0, x);
    Ok(())
}
