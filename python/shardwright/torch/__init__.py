"""Plans a PyTorch module's training and runs it on many processes with DTensor.

In every process, after `torch.distributed.init_process_group`:

    from shardwright.torch import parallelize

    model = parallelize(model, (inputs, targets), loss_fn=torch.nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in data:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

from ._parallelize import Parallelized, parallelize
from ._pipeline import Pipelined
from ._planning import plan
from ._probe import probe
from ._tensor import ShardTensor
from ._trainer import planned_trainer
from ._verify import Traffic, Verification, verify_plan

__all__ = ["Parallelized", "Pipelined", "ShardTensor", "Traffic", "Verification", "parallelize", "plan", "planned_trainer", "probe", "verify_plan"]
