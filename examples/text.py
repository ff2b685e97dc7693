"""Is this review good or bad, and is it a review at all? Run python examples/text.py (BBALPHA_QUICK=1: a short run)."""

import os
import random

import torch
from torch import nn

import bbalpha
from bbalpha import metrics

quick = bool(os.environ.get("BBALPHA_QUICK"))
torch.manual_seed(0)
random.seed(0)

WORDS = {0: ["awful", "boring", "bad", "dull", "poor"], 1: ["great", "lovely", "good", "fine", "superb"]}
FILLER = ["the", "a", "this", "film", "plot", "cast", "and", "was", "really", "with", "very", "one", "of", "story"]
ELSEWHERE = ["invoice", "due", "shipment", "customs", "port", "box", "weight", "freight"]
VOCABULARY = {w: i for i, w in enumerate(["<pad>", *FILLER, *WORDS[0], *WORDS[1], *ELSEWHERE])}


def review(label):
    """Ten words; of the three that judge, most agree with the label."""
    judging = [random.choice(WORDS[label if random.random() < 0.8 else 1 - label]) for _ in range(3)]
    return random.sample([*random.choices(FILLER, k=7), *judging], 10)


def encoded(sentences):
    """Token numbers (N, T), padded with 0."""
    rows = [torch.tensor([VOCABULARY[w] for w in s]) for s in sentences]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(len(VOCABULARY), 32), nn.Dropout(0.3)
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, tokens):
        real = (tokens != 0)[..., None]
        words = self.hidden(self.drop(self.embedding(tokens))).relu() * real  # (N, T, 32)
        return self.head(self.drop(words.sum(1) / real.sum(1)))  # (N, 2)


net, labels = Reader(), [i % 2 for i in range(400)]
x, y = encoded([review(label) for label in labels]), torch.tensor(labels)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(20 if quick else 100):
    loss = bbalpha.cross_entropy(bbalpha.sample(net, x, n_passes=10), y, alpha=0.5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

p = bbalpha.predict_classification(net, encoded([review(label) for label in labels]), seed=0)
other = bbalpha.predict_classification(net, encoded([random.choices(ELSEWHERE, k=6) for _ in range(200)]), seed=0)
print(f"accuracy {metrics.accuracy(p.probs, y):.3f}, calibration error {metrics.ece(p.probs, y):.3f}")
here, there = p.mutual_information.mean(), other.mutual_information.mean()
print(f"mutual information: reviews {here:.3f}, other texts {there:.3f} nats")
