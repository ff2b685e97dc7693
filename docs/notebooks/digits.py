"""# Digits, and pictures that were tampered with

Two networks of the same shape learn scikit-learn's small digits: one plainly, one with dropout and the alpha loss.
Then their pictures are changed by a few shades of grey, in the direction that harms most.
"""

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import bbalpha
from bbalpha.networks import mlp

torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images))
x, y = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
(x_train, x_held, x_test), (y_train, _, y_test) = x.split([1000, 300, 497]), y.split([1000, 300, 497])

# %%
plain = mlp([64, 100, 100, 10], dropout=0.0, input_dropout=0.0)
net = mlp([64, 100, 100, 10], dropout=0.3, input_dropout=0.0)
options = {"epochs": 25, "batch_size": 100, "learning_rate": 3e-3, "seed": 0, "progress": False}
bbalpha.fit(plain, (x_train, y_train), objective=bbalpha.CrossEntropy(0.0), n_passes=None, **options)
bbalpha.fit(net, (x_train, y_train), objective=bbalpha.CrossEntropy(0.5), n_passes=10, **options)


def told(x):
    """The predictions of the plain network, of one pass, and of the other, of a hundred."""
    return (
        bbalpha.predict_classification(plain, x, n_passes=None),
        bbalpha.predict_classification(net, x, seed=0),
    )


for name, p in zip(("plain", "alpha 0.5"), told(x_test), strict=True):
    right, likely = (p.label == y_test).float().mean(), p.log_prob(y_test).mean()
    print(f"{name:9}: accuracy {right:.3f}, log-likelihood a row {likely:.3f}")

# %% [markdown]
# **The attack.** `fgsm` goes one step along the sign of the gradient of the predictive distribution; every pixel
# changes by at most `step`, of a range from 0 to 1. Each network is attacked through its own gradient.

# %%
steps = [0.0, 0.05, 0.1, 0.2, 0.3]
rows = {"plain": [], "alpha 0.5": []}
for step in steps:
    for name, model, n_passes in (("plain", plain, None), ("alpha 0.5", net, 10)):
        tampered = bbalpha.fgsm(model, x_test, step=step, n_passes=n_passes, seed=0) if step else x_test
        p = told(tampered)[name != "plain"]
        rows[name].append(((p.label == y_test).float().mean().item(), p.entropy.mean().item()))

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
for (name, values), dash in zip(rows.items(), ("--", "-"), strict=True):
    for ax, column in zip(axes, zip(*values, strict=True), strict=True):
        ax.plot(steps, column, dash, marker="o", label=name)
axes[0].set_ylabel("accuracy")
axes[1].set_ylabel("entropy of the prediction, nats")
for ax in axes:
    ax.set_xlabel("step")
axes[1].legend()
plt.show()

# %% [markdown]
# Both networks fall. The question is whether they notice: right answers that are unsure can be sent to a person.
#
# **The alarm.** A `Detector` is set on clean rows that were not trained on, so that about 5 % of clean rows are
# flagged.

# %%
detector = bbalpha.Detector(net, score="entropy", false_alarm=0.05).fit(x_held)
print(f"flagged of clean pictures: {detector.flag(x_test).float().mean():.0%}")
for step in (0.1, 0.2, 0.3):
    tampered = bbalpha.fgsm(net, x_test, step=step, n_passes=10, seed=0)
    print(f"flagged at step {step}: {detector.flag(tampered).float().mean():.0%}")

# %% [markdown]
# Larger steps need not raise more alarms: a picture that has been pushed well into another class looks sure again. An
# alarm by uncertainty is one safeguard and no proof.

# %%
tampered = bbalpha.fgsm(net, x_test[:6], step=0.1, n_passes=10, seed=0)
figure, axes = plt.subplots(2, 6, figsize=(9, 3.4))
for line, pictures in zip(axes, (x_test[:6], tampered), strict=True):
    p = told(pictures)[1]
    for ax, picture, label, entropy in zip(line, pictures, p.label, p.entropy, strict=True):
        ax.imshow(picture.view(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        ax.set_title(f"{label} ({entropy:.2f})", fontsize=10)
        ax.axis("off")
plt.show()

# %% [markdown]
# Above: clean, below: tampered with, each with the answer and its entropy in nats. What such an alarm cannot see is
# in [Detect unusual inputs](../guides/unusual.md), and attacks that go on until the network is sure again in [the
# paper's attacks](../adversarial.md).
