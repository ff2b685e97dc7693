"""A curve with a gap in its data: noise, ignorance, and intervals that hold what they promise.

python examples/regression.py [figure.png]    (BBALPHA_QUICK=1 for a short run)
"""

import os
import sys

import torch
from torch import nn

import bbalpha
from bbalpha import metrics, plots
from bbalpha.calibration import conformal_intervals

quick = bool(os.environ.get("BBALPHA_QUICK"))
torch.manual_seed(0)


def measure(n):
    """A quantity known on both sides of a gap, with noise of 0.15."""
    x = torch.cat((torch.rand(n // 2, 1) * 2 - 3, torch.rand(n - n // 2, 1) * 2 + 1))
    return x, (1.5 * x).sin() + 0.15 * torch.randn(n, 1)


x, y = measure(200)
net = nn.Sequential(
    *(nn.Linear(1, 100), nn.Tanh(), nn.Dropout(0.05)),
    *(nn.Linear(100, 100), nn.ReLU(), nn.Dropout(0.05)),
    nn.Linear(100, 1),
)
objective = bbalpha.GaussianNLL(alpha=0.5, precision="learned")
groups = bbalpha.param_groups(net, length_scale=0.1, n_data=len(x))
optimizer = torch.optim.Adam([*groups, {"params": objective.parameters()}], lr=1e-2)
for _ in range(100 if quick else 1500):
    loss = objective(bbalpha.sample(net, x, n_passes=10), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

noise = objective.precision.detach()
print(f"learned noise {noise.rsqrt():.3f} (true: 0.150)")

new_x, new_y = measure(500)
p = bbalpha.predict_regression(net, new_x, precision=noise, seed=0)
print(f"NLL {-p.log_prob(new_y).mean():.3f} nats, RMSE {metrics.rmse(p.mean, new_y):.3f}")
gap = bbalpha.predict_regression(net, torch.zeros(1, 1), precision=noise, seed=0)
print(f"epistemic deviation near data {p.epistemic_std.mean():.3f}, in the gap {gap.epistemic_std.item():.3f}")

held_x, held_y = measure(100)
guard = conformal_intervals(bbalpha.predict_regression(net, held_x, precision=noise, seed=0), held_y, coverage=0.9)
low, high = guard.interval(p)
print(f"90% intervals hold {metrics.interval_coverage(low, high, new_y):.3f} of new targets")

if len(sys.argv) > 1:
    grid = torch.linspace(-4, 4, 300)[:, None]
    curve = bbalpha.predict_regression(net, grid, precision=noise, masks="shared", seed=0)
    ax = plots.regression_bands(grid, curve, data=(x, y))
    ax.figure.savefig(sys.argv[1], dpi=150)
