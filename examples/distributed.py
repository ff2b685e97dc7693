"""One network trained on all processes: `torchrun --nproc-per-node 2 distributed.py`, or python for one alone.

Started again with any number of processes, it goes on from the checkpoint.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import bbalpha
from bbalpha.distributed import Spread, device, processes

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

with processes():  # those that torchrun started
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.2), nn.Linear(100, 10)).to(device())
    ranks = torch.distributed.get_world_size()
    history = bbalpha.fit(
        net, (x[:1400], y[:1400]), objective=bbalpha.CrossEntropy(alpha=0.5), epochs=10, learning_rate=1e-2, seed=0,
        distributed=Spread(passes=2 if ranks % 2 == 0 else 1), checkpoint="run",
    )  # fmt: skip
    if torch.distributed.get_rank() == 0:
        p = bbalpha.predict_classification(net, x[1400:].to(device()), seed=0)
        accuracy = (p.label.cpu() == y[1400:]).float().mean()
        print(f"{ranks} ranks, {history.n_steps} steps: loss {history.loss[-1]:.3f}, accuracy {accuracy:.3f}")
