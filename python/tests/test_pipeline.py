"""Pipelines of equal blocks have the loss and the gradients of one device; other losses are refused with the reason."""

import jax
import jax.numpy as jnp
import pytest
import steps
from jax import lax
from test_parallelize import assert_close

from shardwright import PlanError
from shardwright.jax import pipelined


def transformer(layers=4, width=32, heads=4, vocab=64, batch=16, seq=8):
    params = {"embed": steps.normal(vocab, width, scale=0.3), "blocks": steps.block_params(width, (layers,))}

    def loss(params, tokens, weights):
        mask = weights[:, :, None]
        body = jax.checkpoint(lambda x, p: (steps.block(x, p, heads) * mask, None))
        x = lax.scan(body, params["embed"][tokens], params["blocks"])[0]
        logs = jax.nn.log_softmax(x @ params["embed"].T)
        picked = jnp.take_along_axis(logs, tokens[..., None], -1)[..., 0]
        return -jnp.sum(picked * weights) / weights.sum()

    return loss, (params, steps.ids(vocab, batch, seq), jnp.abs(steps.normal(batch, seq)) + 0.1)


@pytest.mark.parametrize("stages, micro_batches", [(4, 8), (2, 2), (4, 1)])
def test_pipelines_equal_one_device(stages, micro_batches):
    loss, args = transformer()
    fast = pipelined(loss, *args, stages=stages, micro_batches=micro_batches)
    run = jax.jit(jax.value_and_grad(fast)).lower(*args).compile()
    assert_close(run(*args), jax.value_and_grad(loss)(*args))
    text = run.as_text()
    assert "collective-permute" in text


def sequential(body, width=16):
    def loss(params, x):
        return jnp.mean(lax.scan(body, x, params)[0] ** 2)

    return loss, (steps.normal(4, width, width, scale=0.2), steps.normal(16, width))


def mixes_samples(x, w):
    h = x @ w
    return (h - h.mean(0)) / (h.std(0) + 1e-3), None


def stacks_results(x, w):
    return jnp.tanh(x @ w), x.sum()


@pytest.mark.parametrize(
    "case, options, reason",
    [
        (sequential(mixes_samples), {}, "do not treat each sample by itself"),
        (sequential(stacks_results), {}, "stack no results"),
        (sequential(lambda x, w: (jnp.tanh(x @ w), None)), {"stages": 8}, "4 blocks cannot be divided into 8 equal stages"),
        (sequential(lambda x, w: (jnp.tanh(x @ w), None)), {"micro_batches": 3}, "no multiple of 3 micro-batches"),
        ((lambda w, x: jnp.sum(x @ w), (jnp.ones((4, 4)), jnp.ones((16, 4)))), {}, "no `lax.scan`"),
    ],
    ids=["norm", "results", "stages", "micro-batches", "no scan"],
)
def test_other_losses_are_refused_with_the_reason(case, options, reason):
    loss, args = case
    with pytest.raises(PlanError, match=reason):
        pipelined(loss, *args, **{"stages": 2, "micro_batches": 4, **options})
