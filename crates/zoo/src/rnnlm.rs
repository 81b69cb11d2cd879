//! RNNLM: a recurrent language model of FlexFlow's and PaSE's evaluations (arXiv 1807.05358, 2407.04001):
//! embedding, two LSTM layers of 2048 units, softmax over 100,000 words.
//!
//! `unroll=40` replaces each recurrent layer by one op per time step, as FlexFlow does. Embedding and softmax stay one
//! op over all time steps.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, UNROLL, batch, hidden, layers, seq, vocab},
};
use crate::layers::{Sequence, cross_entropy, dense, embedding, ids_by_step, lstm};
use shardwright_graph::GraphBuilder;

pub(super) const FAMILY: Family = Family {
    name: "rnnlm",
    summary: "recurrent language model: two LSTM layers of 2048, vocabulary of 100,000",
    tiny: "batch=3,seq=4,hidden=6,vocab=11",
    transformer: false,
    options: &[batch(64), layers(2), hidden(2048), vocab(100_000), seq(40), UNROLL, DTYPE],
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
    let x = x.whole(b, "outputs")?;
    let logits = dense(b, "logits", "tbc,co->tbo", x, &[vocab], true)?;
    let labels = ids_by_step(b, "labels", [steps, samples], vocab)?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
