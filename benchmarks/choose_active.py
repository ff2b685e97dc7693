"""How our networks are trained in `bbalpha reproduce active`, by held-out training rows -> results/active_chosen.json.

    python benchmarks/choose_active.py

Labels by chance, 100 of them, of a pool out of the first 50,000 training digits; accuracy on 5,000 of the last 10,000.
Seeds are others than those of the experiment, and no test row is read. A step has 64 passes in all, whatever the share
of rows and of passes of one row: it takes the same time.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch

from bbalpha.experiments import mnist
from bbalpha.experiments.active import METHODS, Config, Method, Trainee, prepare
from bbalpha.experiments.results import Ledger
from bbalpha.experiments.skeleton import threads

BASE = METHODS["random"]
CANDIDATES = {
    "as published": BASE,
    "alpha 0.5, 4 passes": Method(BASE.choose, alpha=0.5, train_passes=4, balanced=True),
    "alpha 0.5, 2 passes": Method(BASE.choose, alpha=0.5, train_passes=2, balanced=True),
    "alpha 1, 4 passes": Method(BASE.choose, alpha=1.0, train_passes=4, balanced=True),
}
N_LABELS, FIRST_SEED = 100, 100


def measured(name, seed, config):
    """The row of a candidate: one training on labels by chance."""
    digits = mnist.load(flat=False, validation=True, letters=False)
    data = prepare("mnist", config, seed, digits)
    trainee = Trainee(CANDIDATES[name], config, data)
    with torch.random.fork_rng(), threads(1):
        torch.manual_seed(seed)
        accuracy = trainee.score(trainee.fit(data.pool[-N_LABELS:], data.y_pool[-N_LABELS:]))
    return {"method": name, "seed": seed, "labels": N_LABELS, "accuracy": accuracy}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/active_chosen.json"))
    given, config = parser.parse_args(), Config()
    kept = Ledger(given.out, command="python benchmarks/choose_active.py", seed=FIRST_SEED, settings=asdict(config))
    for seed in range(FIRST_SEED, FIRST_SEED + given.seeds):
        for name in CANDIDATES:
            if not kept.has(method=name, seed=seed):
                kept.add([measured(name, seed, config)], seconds=0.0)
                print(kept.rows[-1], flush=True)


if __name__ == "__main__":
    main()
