"""Plans how to split a training step over devices: the fastest plan, its proved gap to the optimum, and its costs.

>>> import shardwright
>>> plan = shardwright.plan("mlp:batch=64,hidden=1024,layers=2", machine="flat:4")
>>> plan.proved_optimal
True
>>> plan.step_seconds <= plan.baselines["data"]
True

`shardwright.jax.parallelize` plans a JAX training step and runs it, `shardwright.torch.parallelize` a PyTorch module.
"""

from ._native import DoesNotFit, PlanError, __version__
from ._plan import Plan, plan

__all__ = ["DoesNotFit", "Plan", "PlanError", "__version__", "plan"]
