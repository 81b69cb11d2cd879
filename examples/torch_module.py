"""A PyTorch module, planned and trained with DTensor: torchrun --nproc-per-node 2 examples/torch_module.py

Every process runs this program. `parallelize` captures the module, plans its training step for one device per process, and
returns a module whose weights are DTensors in the planned layouts.
"""

import copy

import torch
from shardwright.torch import parallelize
from torch.nn.functional import cross_entropy

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))

model = parallelize(copy.deepcopy(plain), (inputs, targets), loss_fn=cross_entropy)
ours = torch.optim.SGD(model.parameters(), lr=0.1)
alone = torch.optim.SGD(plain.parameters(), lr=0.1)
first = torch.distributed.get_rank() == 0
if first:
    print(model.explain())

for _ in range(3):
    found = model(inputs, targets)
    found.backward()
    ours.step()
    ours.zero_grad()

    # The same step on a single process.
    expected = cross_entropy(plain(inputs), targets)
    expected.backward()
    alone.step()
    alone.zero_grad()
    if first:
        print(f"loss {found.item():.6f}, in one process {expected.item():.6f}")
    torch.testing.assert_close(torch.as_tensor(found.item()), torch.as_tensor(expected.item()), rtol=1e-4, atol=1e-5)

torch.distributed.destroy_process_group()
