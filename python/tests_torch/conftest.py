"""One thread per process, since tests share few cores."""

import torch

torch.set_num_threads(1)
