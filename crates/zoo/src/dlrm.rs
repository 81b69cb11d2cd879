//! DLRM (Naumov et al., arXiv 1906.00091), in the sizes of its benchmark script, which FlexFlow also uses: eight
//! tables of a million rows of 64, bottom MLP 512-512-64, top MLP 1024-1024-1024-1.
//!
//! `interaction=cat` concatenates the features. `interaction=dot` takes the product of every pair; the first top layer
//! then reads the whole symmetric matrix rather than its lower half.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, batch, choice, count},
};
use crate::layers::{
    LayerResult, add, bce_with_logits, concat, data, dense, einsum, embedding, ids, linear, relu, reshape,
};
use shardwright_graph::{BuildError, GraphBuilder, TensorId, ops::Reduce};
use smallvec::smallvec;

pub(super) const FAMILY: Family = Family {
    name: "dlrm",
    summary: "recommendation model: embedding tables, feature interaction, two MLPs",
    tiny: "batch=3,tables=2,rows=7,dim=4,dense=5,bottom=6,top=6,lookups=2",
    transformer: false,
    options: &[
        batch(2048),
        count("tables", 8, 1000, "embedding tables"),
        count("rows", 1_000_000, 1 << 34, "rows of each table"),
        count("dim", 64, 1 << 16, "width of each table"),
        count("lookups", 1, 1 << 16, "rows of each table summed per sample"),
        count("dense", 64, 1 << 20, "dense features per sample"),
        count("bottom", 512, 1 << 20, "width of the bottom MLP"),
        count("top", 1024, 1 << 20, "width of the top MLP"),
        choice(
            "interaction",
            &["cat", "dot"],
            "how features are combined: concatenated, or products of pairs",
        ),
        DTYPE,
    ],
    build,
};

/// A linear layer with ReLU.
fn layer(b: &mut GraphBuilder, name: &str, x: TensorId, outputs: u64) -> LayerResult {
    let y = linear(b, name, x, outputs, true)?;
    relu(b, &format!("{name}.relu"), y)
}

/// The sum of a sample's rows of one table, `[n, dim]`.
fn bag(b: &mut GraphBuilder, o: &OptionValues, table: u64) -> LayerResult {
    let (rows, lookups) = (o.count("rows"), o.count("lookups"));
    let name = format!("table{table}");
    // One look-up needs no sum, and no dimension to sum over.
    let shape = [o.batch(), lookups];
    let shape = if lookups == 1 { &shape[..1] } else { &shape[..] };
    let ids = ids(b, &format!("{name}.ids"), shape, rows)?;
    let (y, _) = embedding(b, &name, o.dtype(), ids, (rows, o.count("dim")), 1.0 / (rows as f64).sqrt())?;
    if lookups == 1 { Ok(y) } else { b.emit(&format!("{name}.sum"), Reduce::sum(smallvec![1]), &[y]) }
}

/// The first layer of the top MLP, before its ReLU: it combines the features.
fn interact(b: &mut GraphBuilder, o: &OptionValues, features: &[TensorId]) -> Result<TensorId, BuildError> {
    let top = o.count("top");
    if o.word("interaction") == "cat" {
        let x = concat(b, "interaction", features, 1)?;
        return linear(b, "top1", x, top, true);
    }
    let mut rows = Vec::with_capacity(features.len());
    for (i, &x) in features.iter().enumerate() {
        rows.push(reshape(b, &format!("feature{i}"), x, &[o.batch(), 1, o.count("dim")])?);
    }
    let all = concat(b, "features", &rows, 1)?;
    let products = einsum(b, "interaction", "nfd,ngd->nfg", &[all, all])?;
    let pairs = dense(b, "top1.pairs", "nfg,fgo->no", products, &[top], false)?;
    let own = linear(b, "top1.dense", features[0], top, true)?;
    add(b, "top1", pairs, own)
}

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let x = data(b, "dense", o.dtype(), &[o.batch(), o.count("dense")])?;
    let x = layer(b, "bottom1", x, o.count("bottom"))?;
    let x = layer(b, "bottom2", x, o.count("bottom"))?;
    let mut features = vec![layer(b, "bottom3", x, o.count("dim"))?];
    for table in 0..o.count("tables") {
        features.push(bag(b, o, table)?);
    }
    let x = interact(b, o, &features)?;
    let x = relu(b, "top1.relu", x)?;
    let x = layer(b, "top2", x, o.count("top"))?;
    let x = layer(b, "top3", x, o.count("top"))?;
    let logits = linear(b, "top4", x, 1, true)?;
    let labels = ids(b, "labels", &[o.batch(), 1], 2)?;
    Ok(bce_with_logits(b, "loss", logits, labels)?)
}
