"""A digit model for the web page, trained on the machine in about twenty seconds.

The 8 x 8 digits that come with scikit-learn, each turned, moved, thickened and soiled a little in three ways, so that a
digit drawn by hand is recognised too. Of the rows held out, one half sets the threshold of what is unusual and the
other half tells how good all of it is.

    train_digits("digits")                        # a folder for `bbalpha serve`
    python -m bbalpha.experiments.digits --out digits
"""

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bbalpha import metrics
from bbalpha.attacks import fgsm
from bbalpha.checkpoint import save, versions
from bbalpha.checks import check_count
from bbalpha.detection import Detector
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy
from bbalpha.prediction import predict_classification
from bbalpha.training.fitting import cosine, fit

ALPHA = 0.5
SIDE = 8
_COPIES, _N_TRAIN, _N_CLEAN = 4, 1200, 300


@dataclass(frozen=True)
class Digits:
    """Digits in three parts; pictures (N, 64) in [0, 1], labels (N,).

    Attributes:
        train: To learn from.
        clean: To set the threshold of what is unusual.
        test: Seen by nobody.
    """

    train: tuple[Tensor, Tensor]
    clean: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def digits(seed: int = 0) -> Digits:
    """scikit-learn's digits, shuffled and split."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = rows.tensor_split([_N_TRAIN, _N_TRAIN + _N_CLEAN])
    return Digits(*((x[part], y[part]) for part in parts))


def train_digits(
    path: str | os.PathLike[str], *, seed: int = 0, epochs: int = 40, progress: bool | None = None
) -> dict[str, Any]:
    """Train a digit model, save it and its detector as the folder `path`, and tell how good it is.

    Args:
        path: The folder, new or of an older model.
        seed: Of the split, the weights and the training.
        epochs: Times through the pictures and their altered copies.
        progress: As in `fit`.

    Returns:
        ``path``, ``seconds`` and ``scores`` on rows that nobody saw: accuracy, nll, the mean mutual information of
        clean, attacked (FGSM, step 0.2) and scribbled pictures, and the share of each that is flagged as unusual.
    """
    epochs, seed, start = check_count("epochs", epochs), check_count("seed", seed, least=0), time.perf_counter()
    data = digits(seed)
    x, y = data.train
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.cat([x, *(altered(x, generator) for _ in range(_COPIES - 1))])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # rate, prior, copies and epochs: likelihood, and attacks and scribbles found, on the rows of `clean`
        net = mlp([SIDE * SIDE, 200, 200, 10], dropout=0.5, input_dropout=0)
    objective = CrossEntropy(alpha=ALPHA)
    fit(net, (pictures, y.repeat(_COPIES)), objective=objective, epochs=epochs, batch_size=200, length_scale=0.01,
        learning_rate=3e-3, schedule=cosine, progress=progress, seed=seed)  # fmt: skip
    detector = Detector(net, score="mutual_information", false_alarm=0.05, seed=0).fit(data.clean[0])
    scores = score(detector, *data.test)
    facts = {"image": {"shape": [SIDE, SIDE]}, "classes": [str(c) for c in range(10)], "scores": scores, "seed": seed,
             "epochs": epochs, "n_rows": len(x), "versions": versions()}  # fmt: skip
    save(net, path, alpha=ALPHA, training=facts)
    detector.save(path)
    return {"path": str(path), "seconds": time.perf_counter() - start, "scores": scores}


def score(detector: Detector, x: Tensor, y: Tensor) -> dict[str, float]:
    """How good a digit model and its detector are on clean digits (N, 64), on attacked ones and on scribbles."""
    p = predict_classification(detector.model, x, seed=0)
    strange = {"attacked": fgsm(detector.model, x, step=0.2, seed=0), "scribbled": scribbles(len(x), seed=1)}
    found = {"accuracy": float(metrics.accuracy(p.probs, y)), "nll": -float(p.log_prob(y).mean())}
    for name, rows in {"clean": x, **strange}.items():
        scores = detector.scores(rows)
        found[f"mutual_information_{name}"] = float(scores.mean())
        found[f"unusual_{name}"] = float((scores > (detector.threshold or 0.0)).double().mean())
    return found


def altered(x: Tensor, generator: torch.Generator) -> Tensor:
    """Digits as another hand might have drawn them (N, 64): turned, sheared, moved, thicker or thinner, with noise."""
    n = len(x)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape or (n,), generator=generator)

    angle, shear = between(-0.2, 0.2), between(-0.25, 0.25)
    wide, tall = between(0.85, 1.25), between(0.95, 1.15)
    across, down = between(-0.22, 0.22), between(-0.12, 0.12)  # 1 is half of the picture: four cells
    turn = torch.stack(
        [
            torch.stack([wide * angle.cos(), shear - angle.sin(), across], 1),
            torch.stack([angle.sin(), tall * angle.cos(), down], 1),
        ],
        1,
    )  # fmt: skip  (N, 2, 3)
    grid = functional.affine_grid(turn, [n, 1, SIDE, SIDE], align_corners=False)
    moved = functional.grid_sample(x.reshape(n, 1, SIDE, SIDE), grid, padding_mode="zeros", align_corners=False)
    thick = functional.avg_pool2d(moved, 3, stride=1, padding=1) * 1.5
    share = between(0, 0.5, n, 1, 1, 1)
    inked = (1 - share) * moved + share * thick
    contrast = between(0.6, 1.5, n, 1, 1, 1)
    noise = between(0, 0.06, n, 1, 1, 1) * torch.randn(inked.shape, generator=generator)
    return (inked.clamp(0, 1) ** contrast * between(0.8, 1.15, n, 1, 1, 1) + noise).clamp(0, 1).flatten(1)


def scribbles(n: int, *, seed: int = 0) -> Tensor:
    """Pictures of lines that wander about and mean nothing (n, 64), as ink of a 32 x 32 bitmap in blocks of 4 x 4."""
    generator = torch.Generator().manual_seed(seed)
    n_points, fine = 200, 4 * SIDE
    bend = torch.randn(n, n_points, generator=generator) * 0.5
    heading = 2 * math.pi * torch.rand(n, 1, generator=generator) + bend.cumsum(1)
    path = torch.stack([heading.cos(), heading.sin()], 2).cumsum(1)  # (n, points, 2)
    path = path - path.amin(1, keepdim=True)
    path = 3 + path / path.amax(1, keepdim=True).clamp_min(1) * (fine - 6)
    cells = torch.arange(fine) + 0.5
    across = (cells - path[..., 0, None]) ** 2  # (n, points, 32)
    down = (cells - path[..., 1, None]) ** 2
    away = torch.stack([(a[:, None, :] + d[:, :, None]).amin(0) for a, d in zip(across, down, strict=True)])
    return functional.avg_pool2d((away < 2.0**2).float(), 4).flatten(1)


def main() -> None:
    """Train the digit model and print how good it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("digits"), help="folder of the model")
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small nets are faster so
    told = train_digits(options.out, epochs=options.epochs)
    lines = [f"  {name:30}{value:.3f}" for name, value in told["scores"].items()]
    print("\n".join([f"{told['path']}: {told['seconds']:.0f} s; on held-out digits", *lines]))  # noqa: T201


if __name__ == "__main__":
    main()
