"""# Regression: noise, and what nobody measured

Ninety points of a curve, with a gap in the middle and noise that grows to the right. A network with dropout is
trained with three values of alpha; each says how sure it is, and why not.
"""

# %%
import matplotlib.pyplot as plt
import torch

import bbalpha
from bbalpha.networks import mlp
from bbalpha.plots import regression_bands

torch.manual_seed(0)
torch.set_num_threads(1)


def measure(x):
    return torch.sin(2 * x) + (0.05 + 0.1 * (x + 2)) * torch.randn_like(x)


x = torch.cat((torch.rand(45, 1) - 2, torch.rand(45, 1) + 1))  # from -2 to -1, and from 1 to 2
y = measure(x)
x_new = torch.cat((torch.rand(500, 1) - 2, torch.rand(500, 1) + 1))
y_new = measure(x_new)

# %% [markdown]
# The network returns a mean and a log precision, so that the noise may differ from row to row:
# `GaussianNLL(precision="predicted")`. The prior pulls weights to 0 with `length_scale`.


# %%
class Curve(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp([1, 50, 50, 2], dropout=0.05, input_dropout=0.0)

    def forward(self, x):
        mean, log_precision = self.net(x).split(1, -1)
        return mean, log_precision


grid = torch.linspace(-3, 3, 121)[:, None]
curves = {}
for alpha in (0.0, 0.5, 1.0):
    torch.manual_seed(0)
    model = Curve()
    bbalpha.fit(
        model, (x, y), objective=bbalpha.GaussianNLL(alpha, precision="predicted"), epochs=300, batch_size=45,
        learning_rate=5e-3, length_scale=0.1, n_passes=10, seed=0, progress=False,
    )  # fmt: skip
    held = bbalpha.predict_regression(model, x_new, precision="predicted", seed=0)
    curves[alpha] = bbalpha.predict_regression(model, grid, precision="predicted", seed=0)
    low, high = held.interval(0.9)
    inside = ((low <= y_new) & (y_new <= high)).float().mean()
    print(f"alpha {alpha}: log-likelihood a row {held.log_prob(y_new).mean():.2f}, in the 90 % interval {inside:.0%}")

# %% [markdown]
# alpha = 0 is MC dropout as everybody knows it. Larger alphas look at the likeliest passes of each row, and the
# passes may differ more from each other.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
for ax, (alpha, p) in zip(axes, curves.items(), strict=True):
    regression_bands(grid, p, data=(x, y), ax=ax)
    ax.set_title(f"alpha = {alpha}")
    ax.set_ylim(-4, 4)
    if ax is not axes[1]:
        ax.get_legend().remove()  # one for all three
plt.show()

# %% [markdown]
# Two kinds of uncertainty: `aleatoric_std` is noise, which more data would not settle; `epistemic_std` is what the
# passes disagree about, which more data would.

# %%
for place in (-1.5, 0.0, 1.5, 3.0):
    row = int((grid[:, 0] - place).abs().argmin())
    p = curves[0.5]
    print(f"at {place:4}: noise {p.aleatoric_std[row].item():.2f}, ignorance {p.epistemic_std[row].item():.2f}")

# %% [markdown]
# Where rows were, the noise on the right is told from the noise on the left. In the gap and outside of it the passes
# disagree more than where there are rows. How much more is a matter of dropout rate and prior, not of truth: see
# [Choose the dropout rate](../guides/dropout-rate.md).
