"""Handwritten digits: train a dropout net with the alpha objective, then act on what it does not know.

python examples/classification.py             (BBALPHA_QUICK=1 for a short run)
"""

import os

import torch
from sklearn.datasets import load_digits

import bbalpha
from bbalpha import metrics
from bbalpha.calibration import conformal_sets, fit_temperature
from bbalpha.networks import mlp

quick = bool(os.environ.get("BBALPHA_QUICK"))
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
rows = torch.randperm(len(x))
train, held_out, test = rows[:1000], rows[1000:1300], rows[1300:]

net = mlp([64, 100, 100, 10], dropout=0.1, input_dropout=0.0)
optimizer = torch.optim.Adam(bbalpha.param_groups(net, length_scale=0.1, n_data=len(train)), lr=3e-3)
for _ in range(5 if quick else 40):
    for batch in train[torch.randperm(len(train))].split(100):
        loss = bbalpha.cross_entropy(bbalpha.sample(net, x[batch], n_passes=10), y[batch], alpha=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

temperature = fit_temperature(net, x[held_out], y[held_out])
options = {"temperature": temperature, "seed": 0}
p = bbalpha.predict_classification(net, x[test], **options)
wrong = p.label != y[test]
print(f"temperature {temperature:.2f}, accuracy {metrics.accuracy(p.probs, y[test]):.3f}")
print(f"NLL {-p.log_prob(y[test]).mean():.3f} nats, calibration error {metrics.ece(p.probs, y[test]):.3f}")

# abstain: leave the least sure tenth to a person
sure = p.entropy <= p.entropy.quantile(0.9)
print(
    f"errors among the surest 90%: {wrong[sure].float().mean():.3f}, among the rest: {wrong[~sure].float().mean():.3f}"
)

# a set of labels that holds the truth 19 times in 20
guard = conformal_sets(bbalpha.predict_classification(net, x[held_out], **options), y[held_out], coverage=0.95)
sets = guard.prediction_set(p)
held = sets.gather(1, y[test][:, None]).float().mean()
print(f"sets of {sets.sum(1).float().mean():.2f} labels on average hold the truth in {held:.3f} of the rows")

# inputs from elsewhere: digits upside down
strange = bbalpha.predict_classification(net, x[test].flip(1), **options)
scores = torch.cat((p.mutual_information, strange.mutual_information))
elsewhere = torch.arange(len(scores)) >= len(test)
print(f"upside-down digits told from the others by mutual information: AUROC {metrics.auroc(scores, elsewhere):.3f}")
