//! NMT: the translation model of FlexFlow's evaluation (arXiv 1807.05358, table 3): an LSTM encoder and
//! decoder of two layers each, attention, softmax. 1024 units follow Mirhoseini et al. (arXiv 1706.04972);
//! the vocabulary of 32,000 is ours.
//!
//! The decoder starts from the encoder's last state. Attention (Luong's, without input feeding) and softmax run over
//! all time steps at once; `unroll=40` unrolls the recurrent layers only.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, UNROLL, batch, hidden, layers, seq, vocab},
};
use crate::layers::{
    LstmOutput, LstmState, Sequence, attend, cross_entropy, dense, embedding, ids_by_step, last, lstm,
};
use shardwright_graph::{BuildError, GraphBuilder, TensorId};

pub(super) const FAMILY: Family = Family {
    name: "nmt",
    summary: "LSTM encoder-decoder with attention: two layers of 1024 on each side",
    tiny: "batch=3,seq=4,hidden=6,vocab=11",
    transformer: false,
    options: &[batch(64), layers(2), hidden(1024), vocab(32_000), seq(40), UNROLL, DTYPE],
    build,
};

/// Embedded token ids, split into time steps if `unrolled`.
fn words(
    b: &mut GraphBuilder,
    name: &str,
    o: &OptionValues,
    (steps, unrolled): (u64, bool),
) -> Result<Sequence, BuildError> {
    let tokens = ids_by_step(b, &format!("{name}.tokens"), [steps, o.batch()], o.count("vocab"))?;
    let table = (o.count("vocab"), o.count("hidden"));
    let (x, _) = embedding(b, &format!("{name}.embedding"), o.dtype(), tokens, table, 0.1)?;
    if unrolled { Sequence::unroll(b, &format!("{name}.step"), x) } else { Ok(Sequence::Whole(x)) }
}

fn final_state(b: &mut GraphBuilder, name: &str, layer: &LstmOutput) -> Result<LstmState, BuildError> {
    Ok(LstmState {
        h: last(b, &format!("{name}.last_h"), &layer.y)?,
        c: last(b, &format!("{name}.last_c"), &layer.c)?,
    })
}

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (hidden, vocab, layers) = (o.count("hidden"), o.count("vocab"), o.count("layers"));
    let (steps, unrolled) = o.steps(layers.saturating_mul(2))?;
    let mut x = words(b, "encoder", o, (steps, unrolled))?;
    let mut states = Vec::new();
    for i in 1..=layers {
        let name = format!("encoder.lstm{i}");
        let layer = lstm(b, &name, &x, hidden, None)?;
        states.push(final_state(b, &name, &layer)?);
        x = layer.y;
    }
    let memory = x.whole(b, "encoder.outputs")?;
    let mut x = words(b, "decoder", o, (steps, unrolled))?;
    for (i, state) in (1..).zip(states) {
        x = lstm(b, &format!("decoder.lstm{i}"), &x, hidden, Some(state))?.y;
    }
    let output: TensorId = x.whole(b, "decoder.outputs")?;
    let x = b.scoped("attention", |b| attend(b, output, memory))?;
    let logits = dense(b, "logits", "tbc,co->tbo", x, &[vocab], true)?;
    let labels = ids_by_step(b, "labels", [steps, o.batch()], vocab)?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
