//! RNNTC: the recurrent text classifier of FlexFlow's evaluation (arXiv 1807.05358, table 3): embedding,
//! four recurrent layers, softmax over the last step. Sizes are not published; 1024 units and 20,000 words
//! are ours.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, UNROLL, batch, classes, hidden, layers, seq, vocab},
};
use crate::layers::{Sequence, cross_entropy, dense, embedding, ids, ids_by_step, last, lstm};
use shardwright_graph::GraphBuilder;

pub(super) const FAMILY: Family = Family {
    name: "rnntc",
    summary: "recurrent text classifier: four LSTM layers and a softmax",
    tiny: "batch=3,seq=4,hidden=6,vocab=11",
    transformer: false,
    options: &[batch(64), layers(4), hidden(1024), vocab(20_000), seq(40), UNROLL, classes(2), DTYPE],
    build,
};

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, hidden, vocab, layers) =
        (o.batch(), o.count("hidden"), o.count("vocab"), o.count("layers"));
    let (steps, unrolled) = o.steps(layers)?;
    let tokens = ids_by_step(b, "tokens", [steps, samples], vocab)?;
    let (x, _) = embedding(b, "embedding", o.dtype(), tokens, (vocab, hidden), 0.1)?;
    let mut x = if unrolled { Sequence::unroll(b, "step", x)? } else { Sequence::Whole(x) };
    for i in 1..=layers {
        x = lstm(b, &format!("lstm{i}"), &x, hidden, None)?.y;
    }
    let x = last(b, "last", &x)?;
    let logits = dense(b, "logits", "bc,co->bo", x, &[o.count("classes")], true)?;
    let labels = ids(b, "labels", &[samples], o.count("classes"))?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
