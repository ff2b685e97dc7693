"""Which labels to ask for, and where to measure next: scores and choices from what K functions say.

Passes with shared masks are functions, and what they disagree on is what a label can settle. All of it takes the
probabilities of K such passes (K, N, C), in memory, on disk, or computed when read.

    p = bbalpha.predict_classification(net, pool, masks="shared", keep_passes=True)
    acquisition.batch_bald(p, 10).indices                                 # ten labels that tell most together
    f = bbalpha.Functions(net, n_passes=100, seed=0)
    acquisition.batch_bald(f.probs(million_rows), 10)                     # in bounded memory
    acquisition.learn(pool, ask_a_person, fit=train, n_labels=200)        # train, choose, ask, and again
"""

from bbalpha.acquisition.batch import batch_bald
from bbalpha.acquisition.covering import k_center
from bbalpha.acquisition.gaussian import batch_information_gain, information_gain
from bbalpha.acquisition.improvement import expected_improvement, thompson
from bbalpha.acquisition.labels import LabelFile
from bbalpha.acquisition.learning import Learnt, Round, learn
from bbalpha.acquisition.scores import bald, entropy, epig, mean_std, variation_ratio
from bbalpha.acquisition.selection import Selection, random, top
from bbalpha.acquisition.stochastic import power_bald, softmax_bald

__all__ = [
    "LabelFile",
    "Learnt",
    "Round",
    "Selection",
    "bald",
    "batch_bald",
    "batch_information_gain",
    "entropy",
    "epig",
    "expected_improvement",
    "information_gain",
    "k_center",
    "learn",
    "mean_std",
    "power_bald",
    "random",
    "softmax_bald",
    "thompson",
    "top",
    "variation_ratio",
]
