"""Discs on noisy ground, pixel by pixel: where is the border, and what is that thing without a name?

python examples/segmentation.py               (BBALPHA_QUICK=1 for a short run)
"""

import os

import torch
from torch import nn

import bbalpha
from bbalpha import metrics

quick = bool(os.environ.get("BBALPHA_QUICK"))
torch.manual_seed(0)
SIZE = 32


def scenes(n):
    """Images (N, 1, H, W) of two discs, dark and bright, on noise; labels (N, H, W): 0 ground, 1 dark, 2 bright."""
    v, u = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    labels = torch.zeros(n, SIZE, SIZE, dtype=torch.long)
    for shade in (1, 2):
        centre, radius = torch.rand(2, n, 1, 1) * SIZE, torch.rand(n, 1, 1) * 5 + 4
        labels[(u - centre[0]) ** 2 + (v - centre[1]) ** 2 < radius**2] = shade
    brightness = torch.tensor([0.0, -1.0, 1.0])[labels]
    return (brightness + 0.5 * torch.randn(n, SIZE, SIZE))[:, None], labels


net = nn.Sequential(
    *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Dropout2d(0.1)),
    *(nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Dropout2d(0.1)),
    nn.Conv2d(16, 3, 3, padding=1),  # logits (N, C, H, W)
)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(20 if quick else 200):
    x, y = scenes(16)
    loss = bbalpha.cross_entropy(bbalpha.sample(net, x, n_passes=5), y, alpha=0.5)  # every pixel by itself
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

x, y = scenes(10 if quick else 50)
p = bbalpha.predict_classification(net, x, n_passes=50, seed=0)
print(f"probabilities {tuple(p.probs.shape)}, entropy {tuple(p.entropy.shape)}")
print(f"accuracy {metrics.accuracy(p.probs, y):.3f}, calibration error {metrics.ece(p.probs, y):.3f}")

moved = [y.roll(shift, axis) != y for shift in (-1, 1) for axis in (1, 2)]
border = torch.stack(moved).any(0)
print(f"entropy on borders {p.entropy[border].mean():.3f}, elsewhere {p.entropy[~border].mean():.3f} nats")

wrong = p.label != y
print(f"wrong pixels found by their entropy: AUROC {metrics.auroc(p.entropy.flatten(), wrong.flatten()):.3f}")
