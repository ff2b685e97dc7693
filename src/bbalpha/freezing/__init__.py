"""Frozen samples: K thinned networks as one plain module, to be called, exported and served without randomness.

An exporter that does not know better removes dropout: onnxruntime does so without a word, and what is left is one
network that is always sure. `freeze` keeps K passes of one seed instead, their masks as constants:

    frozen = bbalpha.freeze(net, 20, seed=0)                    # x (N, ...) -> (20, N, ...), the same whenever called
    net = nn.Sequential(frozen, freezing.ClassificationSummary())   # -> probs, entropy, mutual_information
    freezing.export_onnx(frozen, "net.onnx", x, summary=freezing.ClassificationSummary())

A chain of plain layers becomes one batched network (`thinned.py`); any other model is run with its random calls given
what `bbalpha.sample` gave them (`recording.py`, `replaying.py`).
"""

from bbalpha.freezing.frozen import freeze
from bbalpha.freezing.onnx import export_onnx
from bbalpha.freezing.summaries import Classes, ClassificationSummary, Numbers, RegressionSummary

__all__ = ["Classes", "ClassificationSummary", "Numbers", "RegressionSummary", "export_onnx", "freeze"]
