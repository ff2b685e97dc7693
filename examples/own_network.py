"""A network of your own, a loop of your own: what changes when it becomes Bayesian.

python examples/own_network.py    (BBALPHA_QUICK=1 for a short run)
"""

import os

import torch
from torch import nn

import bbalpha

quick = bool(os.environ.get("BBALPHA_QUICK"))
torch.manual_seed(0)
wear = torch.rand(800, 1)
time = torch.linspace(0, 1, 30)
x = torch.sin(30 * time * (1 + wear)) * (0.3 + wear) + 0.1 * torch.randn(800, 30)  # what a machine sounds like
hours = 100 * (1 - wear) + 5 * torch.randn(800, 1)  # that it has left
mean, std = hours[:600].mean(), hours[:600].std()
x, y = x.unsqueeze(2), (hours - mean) / std


class Listener(nn.Module):
    """GRU and attention; its dropout is a module here and a function there."""

    def __init__(self, width=32, rate=0.1):
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, dropout=rate, batch_first=True)
        self.rate, self.head = rate, nn.Linear(width, 1)

    def forward(self, x):
        h = self.gru(x)[0]
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(nn.functional.dropout(h.mean(1), self.rate, self.training))


net = Listener()
print(bbalpha.audit(net, x[:8]))
objective = bbalpha.GaussianNLL(alpha=0.5)
groups = [{"params": net.parameters()}, {"params": objective.parameters(), "lr": 0.05}]
optimizer = torch.optim.Adam(groups, lr=1e-2)
for _ in range(1 if quick else 20):
    for rows in torch.randperm(600).split(50):
        outputs = bbalpha.sample(net, x[rows], n_passes=10)  # was: net(x[rows])
        loss = objective(outputs, y[rows])  # was: F.mse_loss(...)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

p = bbalpha.predict_regression(net, x[600:], precision=objective.precision, seed=0).rescaled(scale=std, shift=mean)
low, high = p.interval(0.9)
print(f"error {(p.mean - hours[600:]).square().mean().sqrt():.1f} hours, deviation told {p.std.mean():.1f}")
print(f"inside the 90 % intervals {((low <= hours[600:]) & (hours[600:] <= high)).float().mean():.2f}")
noise = bbalpha.predict_regression(net, 3 * torch.randn(100, 30, 1), precision=objective.precision, seed=0)
print(f"epistemic deviation {p.epistemic_std.mean():.1f}, on noise {std * noise.epistemic_std.mean():.1f}")
