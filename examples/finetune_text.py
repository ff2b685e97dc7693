"""Which topic of Python's own documentation does a line come from? A transformer trained with the alpha loss.

The model is Hugging Face's BERT from a small config, untouched; the one line that differs from ordinary
training is the loss. Run: python examples/finetune_text.py        (BBALPHA_QUICK=1 for a few seconds)
"""

import os
import re
import zlib
from pydoc_data.topics import topics

import torch
from transformers import BertConfig, BertForSequenceClassification

import bbalpha

QUICK = bool(os.environ.get("BBALPHA_QUICK"))
TOPICS = ["string-methods", "formatstrings", "debugger", "attribute-access", "assignment", "comparisons", "with"]
WORDS, LENGTH = 2000, 24


def encode(line):  # a line as numbers of words: 0 pads, 1 begins
    words = re.findall(r"\w+|[^\w\s]", line.lower())[: LENGTH - 1]
    ids = [1] + [2 + zlib.crc32(word.encode()) % (WORDS - 2) for word in words]
    return ids + [0] * (LENGTH - len(ids))


def inputs(rows):
    return {"input_ids": ids[rows], "attention_mask": (ids[rows] > 0).long()}


torch.manual_seed(0)
pairs = [(line.strip(), k) for k, name in enumerate(TOPICS) for line in topics[name].splitlines()]
pairs = [(line, k) for line, k in pairs if len(line.split()) >= 5]
ids, label = torch.tensor([encode(line) for line, _ in pairs]), torch.tensor([k for _, k in pairs])
order = torch.randperm(len(pairs))[: 200 if QUICK else None]
test, train = order[: len(order) // 5], order[len(order) // 5 :]

sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=len(TOPICS), **sizes)
model = BertForSequenceClassification(config)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2 if QUICK else 8):
    for rows in train[torch.randperm(len(train))].split(64):
        # before: loss = torch.nn.functional.cross_entropy(model(**inputs(rows)).logits, label[rows])
        loss = bbalpha.cross_entropy(bbalpha.sample(model, inputs(rows), n_passes=4).logits, label[rows], alpha=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.3f}")

p = bbalpha.predict_classification(model, inputs(test), n_passes=10 if QUICK else 50, seed=0)
print(f"on {len(test)} lines it never saw: accuracy {(p.label == label[test]).float().mean():.3f}, ", end="")
print(f"log likelihood {p.log_prob(label[test]).mean():.3f}")
for n in p.entropy.topk(3).indices.tolist():
    line, topic = pairs[test[n]]
    print(f"unsure ({p.entropy[n]:.2f} nats): {line!r} is from {TOPICS[topic]!r}")
