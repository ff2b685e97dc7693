"""Handwritten digits with Lightning: a module as it was, made Bayesian by one base class and one line.

python examples/lightning_digits.py   (BBALPHA_QUICK=1 for a short run; pip install 'bbalpha[lightning,sklearn]')
"""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import bbalpha
from bbalpha import metrics
from bbalpha.integrations.lightning import AlphaSteps, joined

quick = bool(os.environ.get("BBALPHA_QUICK"))
L.seed_everything(0, verbose=False)


class Digits(AlphaSteps, L.LightningModule):
    """Without AlphaSteps and the objective this is any LightningModule; its training_step went."""

    n_passes, seed = 10, 0

    def __init__(self, width=100, alpha=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(width, 10),
        )  # fmt: skip
        self.objective = bbalpha.CrossEntropy(alpha=alpha)

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return torch.optim.Adam(bbalpha.param_groups(self, length_scale=0.1, n_data=1000), lr=3e-3)


images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, held_out, test = random_split(data, [1000, 300, len(data) - 1300])

keeper = ModelCheckpoint("digits", monitor="val_nll")
trainer = L.Trainer(max_epochs=3 if quick else 60, accelerator="cpu", logger=False, enable_progress_bar=False,
                    callbacks=[keeper, EarlyStopping("val_nll", patience=8)])  # fmt: skip
trainer.fit(Digits(), DataLoader(train, 100, shuffle=True), DataLoader(held_out, 300))
net = Digits.load_from_checkpoint(keeper.best_model_path)

p, y = joined(trainer.predict(net, DataLoader(test, 200))), torch.stack([label for _, label in test])
print(
    f"epoch {trainer.current_epoch}: accuracy {metrics.accuracy(p.probs, y):.3f}, NLL {-p.log_prob(y).mean():.3f} nats"
)
wrong, sure = p.label != y, p.entropy <= p.entropy.quantile(0.9)
print(f"errors among the surest 90%: {wrong[sure].float().mean():.3f}, the rest: {wrong[~sure].float().mean():.3f}")
