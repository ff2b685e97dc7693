"""# Fine-tuning: a pretrained network learns to say when it is unsure

A small CNN was trained on digits from 0 to 4, without dropout. It gets a new head with dropout, and learns digits
from 5 to 9 from a hundred pictures, with the alpha loss.
"""

# %%
import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import bbalpha
from bbalpha.plots import risk_coverage

torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
low = labels < 5
body = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
)  # fmt: skip
pretrained = nn.Sequential(body, nn.Linear(512, 5))
bbalpha.fit(
    pretrained, (images[low], labels[low]), objective=bbalpha.CrossEntropy(), n_passes=None, epochs=3,
    learning_rate=3e-3, seed=0, progress=False,
)  # fmt: skip

order = torch.randperm(int((~low).sum()))
x, y = images[~low][order], labels[~low][order] - 5
x, y, x_new, y_new = x[:100], y[:100], x[100:], y[100:]

# %% [markdown]
# The body is kept as it is: what it makes of each picture is computed once, also for ten passes of the head.

# %%


def fine_tuned(alpha, n_passes, dropout):
    torch.manual_seed(0)
    net = nn.Sequential(copy.deepcopy(body), nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 5)))
    if dropout:
        bbalpha.add_dropout(net[1], dropout)  # in front of the linear layers of the head
    net[0].requires_grad_(False).eval()  # batch norm keeps the statistics it came with
    optimizer = torch.optim.Adam(net[1].parameters(), lr=3e-3)
    for _ in range(25):
        for rows in torch.randperm(len(x)).split(50):
            outputs = bbalpha.sample(net, x[rows], n_passes=n_passes) if dropout else net(x[rows])[None]
            loss = bbalpha.cross_entropy(outputs, y[rows], alpha=alpha)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net


plain, net = fine_tuned(0.0, None, None), fine_tuned(0.5, 10, 0.3)
print(bbalpha.audit(net.eval(), x[:4]))

# %%
told = {
    "plain": bbalpha.predict_classification(plain, x_new, n_passes=None),
    "alpha 0.5": bbalpha.predict_classification(net, x_new, seed=0),
}
for name, p in told.items():
    right, likely = (p.label == y_new).float().mean(), p.log_prob(y_new).mean()
    print(f"{name:9}: accuracy {right:.3f}, log-likelihood a row {likely:.3f}")

# %% [markdown]
# **Whom to ask.** Leave the least sure pictures to a person, and what is left should be right. Each curve goes from
# the surest pictures alone to all of them.

# %%
curves = {name: bbalpha.metrics.risk_coverage(p.entropy, p.label != y_new) for name, p in told.items()}
risk_coverage(curves)
plt.show()

# %% [markdown]
# **What it has never seen.** Digits from 0 to 4 are no class of the new head. It has to answer something; it should
# not be sure of it.

# %%
strange = {
    "plain": bbalpha.predict_classification(plain, images[low], n_passes=None),
    "alpha 0.5": bbalpha.predict_classification(net, images[low], seed=0),
}
for name in told:
    known, unknown = told[name].entropy, strange[name].entropy
    auroc = (unknown[:, None] > known).float().mean()
    print(f"{name:9}: entropy {known.mean():.2f} of what it learned, {unknown.mean():.2f} of others; AUROC {auroc:.3f}")

# %% [markdown]
# The same for a network of your own, and for transformers: [Fine-tune a pretrained network](../guides/finetune.md).
# Where you cannot train again: [Uncertainty for the network you already trained](../trained.md).
