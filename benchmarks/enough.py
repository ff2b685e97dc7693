"""How many passes are enough? A tolerance beside K = 100, on MNIST and two UCI sets -> results/enough.json.

    BBALPHA_DATA=... python benchmarks/enough.py

One network for each set, trained once. Then, for several seeds: K = 100 for all rows, and each tolerance. A decision is
the label, or whether the mean is above the training mean (the `threshold`, with a tolerance); it is compared with that
of the run of 100 passes. Two such runs do not agree on every row either, which is the floor beside it (tolerance null:
K = 100 again). `same_as_gone_on` compares with what the same run would have decided with all its passes, masks shared:
what stopping changed. Times are of one thread, all ways in turn, by the processor's clock, the least of each.
The rule and the tolerances were settled before on scikit-learn's digits, diabetes and friedman1 (`--choose`).
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn

import bbalpha
from bbalpha import data, metrics, networks
from bbalpha.experiments import results

Way = float | None  # a tolerance; None: K = 100 again


@dataclass(frozen=True)
class Config:
    n_passes: int = 100
    tolerances: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    alpha: float = 0.5
    digits: int = 20_000
    hidden: tuple[int, ...] = (200, 200)
    epochs: int = 8
    uci: tuple[str, ...] = ("concrete", "kin8nm")
    uci_hidden: tuple[int, ...] = (50, 50)
    uci_dropout: float = 0.1
    uci_steps: int = 1500
    seeds: int = 3
    uci_seeds: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    """A network, rows it has not seen, and how it predicts them."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    seeds: int
    precision: float | None = None  # of a regression

    def predict(self, **options: Any) -> Any:
        if self.precision is None:
            return bbalpha.predict_classification(self.model, self.x, **options)
        threshold = None if options.get("tolerance") is None else 0.0
        return bbalpha.predict_regression(self.model, self.x, precision=self.precision, threshold=threshold, **options)

    def decisions(self, p: Any) -> Tensor:
        """A label, or whether the mean is above that of the training rows (N,)."""
        return p.label if self.precision is None else p.mean[:, 0] > 0

    def answer(self, p: Any) -> Tensor:
        """Probabilities, or mean and ends of the 90 % interval (1 or 3, N, ...)."""
        return p.probs[None] if self.precision is None else torch.stack([p.mean, *p.interval(0.9)])

    def coverage(self, p: Any) -> float:
        """Share of the targets in the 90 % interval, in percent."""
        return 100 * float(metrics.interval_coverage(*p.interval(0.9), self.y))


# ------------------------------------------------------------------------------ problems


def problems(config: Config) -> list[Problem]:
    """What is measured once, after everything was chosen: MNIST with and without dropout of the inputs, and UCI."""
    return [mnist(config, 0.0), mnist(config, 0.5), *(uci(name, config) for name in config.uci)]


def mnist(config: Config, input_dropout: float) -> Problem:
    """20,000 digits to learn from, the 10,000 test digits to predict."""
    train, test = data.load_mnist("train"), data.load_mnist("test")
    x, y = (torch.as_tensor(t[: config.digits]) for t in (train.images, train.labels))
    pixels = lambda t: torch.as_tensor(t).flatten(1).float() / 255  # noqa: E731
    model = classifier(pixels(x), y.long(), config.hidden, input_dropout, config.epochs, config)
    name = "mnist, inputs dropped too" if input_dropout else "mnist"
    return Problem(name, model, pixels(test.images), torch.as_tensor(test.labels).long(), config.seeds)


def uci(name: str, config: Config) -> Problem:
    """The published split 0."""
    found = data.load_uci(name)
    train, test = found.splits[0]
    return regression(name, found.X, found.y, train, test, config)


def chosen_on(config: Config) -> list[Problem]:
    """What the constants of `_engine/settling.py` and the tolerances were chosen on: not MNIST, not the UCI sets."""
    X, y = datasets.load_digits(return_X_y=True)
    x, y = torch.as_tensor(X / 16).float(), torch.as_tensor(y)
    model = classifier(x[:900], y[:900], (100, 100), 0.0, 60, config)
    found = [Problem("digits", model, x[900:], y[900:], config.seeds)]
    sparse = replace(config, uci_hidden=(50,), uci_dropout=0.05)  # half a drop in ten passes: cannot be balanced
    friedman, diabetes = (
        datasets.make_friedman1(2000, noise=1.0, random_state=0),
        datasets.load_diabetes(return_X_y=True),
    )
    for name, (X, y), own in [
        ("friedman1", friedman, config),
        ("friedman1, dropout 0.05", friedman, sparse),
        ("diabetes", diabetes, replace(config, uci_steps=150)),
        ("diabetes, overfitted", diabetes, config),
    ]:
        half = range(len(y) // 2)
        found.append(regression(name, X, y, half, range(len(half), len(y)), own))
    return found


def classifier(
    x: Tensor, y: Tensor, hidden: tuple[int, ...], input_dropout: float, epochs: int, config: Config
) -> nn.Module:
    torch.manual_seed(config.seed)
    model = networks.mlp([x.shape[1], *hidden, int(y.max()) + 1], dropout=0.5, input_dropout=input_dropout)
    bbalpha.fit(
        model, (x, y), objective=bbalpha.CrossEntropy(config.alpha), epochs=epochs, n_passes=3, progress=False,
        seed=config.seed,
    )  # fmt: skip
    return model


def regression(name: str, X: Any, y: Any, train: Any, test: Any, config: Config) -> Problem:
    """A network that was trained on standardised rows."""
    train, test = list(train), list(test)
    x, y = torch.as_tensor(X).double(), torch.as_tensor(y).double().reshape(-1, 1)
    x = ((x - x[train].mean(0)) / x[train].std(0).clamp_min(1e-6)).float()
    y = ((y - y[train].mean()) / y[train].std()).float()
    torch.manual_seed(config.seed)
    model = networks.mlp([x.shape[1], *config.uci_hidden, 1], dropout=config.uci_dropout, input_dropout=0)
    objective = bbalpha.GaussianNLL(config.alpha)
    epochs = max(1, round(config.uci_steps * 128 / len(train)))
    bbalpha.fit(model, (x[train], y[train]), objective=objective, epochs=epochs, progress=False, seed=config.seed)
    return Problem(name, model, x[test], y[test], config.uci_seeds, objective.precision.item())


# ------------------------------------------------------------------------------ measuring


def run(some: list[Problem], config: Config, reference: int | None = None) -> list[dict[str, object]]:
    """A record for every problem and tolerance, and for K = 100 again; beside a `reference` of so many passes."""
    rows: list[dict[str, object]] = []
    for problem in some:
        full, found, seconds = predictions(problem, config)
        near = None if reference is None else within(problem, found, reference)
        for way in (None, *config.tolerances):
            record = {"dataset": problem.name, "tolerance": way, "n_rows": len(problem.x)}
            ratio = min(seconds[way]) / min(seconds[None])
            rows.append(record | compared(problem, full, found[way]) | {"ratio": round(ratio, 3)})
            if near is not None and way is not None:
                rows[-1]["within"] = near[way]
        gone = gone_on(problem, config)
        for row in rows[-len(config.tolerances) :]:
            row |= gone[row["tolerance"]]
        print(*rows[-len(found) :], sep="\n", flush=True)
    return rows


def predictions(problem: Problem, config: Config) -> tuple[list[Any], dict[Way, list[Any]], dict[Way, list[float]]]:
    """K = 100 for every seed; K = 100 again (None) and each tolerance, with other seeds; the times of these."""
    full: list[Any] = []
    found: dict[Way, list[Any]] = {way: [] for way in (None, *config.tolerances)}
    seconds: dict[Way, list[float]] = {way: [] for way in found}
    for seed in range(problem.seeds):
        full.append(problem.predict(n_passes=config.n_passes, seed=seed))
        for way in found:  # all in turn
            start = time.process_time()
            found[way].append(problem.predict(n_passes=config.n_passes, tolerance=way, seed=1000 + seed))
            seconds[way].append(time.process_time() - start)
    return full, found, seconds


def within(problem: Problem, found: dict[Way, list[Any]], reference: int) -> dict[Way, float]:
    """Share of the rows whose probabilities, or mean and ends, are as near to those of many passes as was asked."""
    many = problem.predict(n_passes=reference, seed=12345)
    right, unit = problem.answer(many), 1.0 if problem.precision is None else many.std
    shares = {}
    for way, several in found.items():
        off = [((problem.answer(p) - right) / unit).abs().flatten(2).amax((0, 2)) for p in several]
        shares[way] = round(fmean(float((o <= (way or 0.0)).double().mean()) for o in off), 4)
    return shares


def gone_on(problem: Problem, config: Config) -> dict[Way, dict[str, float]]:
    """Share of the decisions that the passes left out, with the same masks, would not have changed; and passes."""
    same: dict[Way, list[float]] = {tolerance: [] for tolerance in config.tolerances}
    passes: dict[Way, list[float]] = {tolerance: [] for tolerance in config.tolerances}
    for seed in range(problem.seeds):
        options = {"n_passes": config.n_passes, "masks": "shared", "seed": seed}
        to_the_end = problem.decisions(problem.predict(tolerance=1e-12, **options))
        for tolerance in config.tolerances:
            p = problem.predict(tolerance=tolerance, **options)
            same[tolerance].append(float((problem.decisions(p) == to_the_end).double().mean()))
            passes[tolerance].append(float(p.passes_used.double().mean()))
    return {t: {"same_as_gone_on": round(fmean(same[t]), 5), "passes_shared": round(fmean(passes[t]), 2)} for t in same}


def compared(problem: Problem, full: list[Any], found: list[Any]) -> dict[str, object]:
    """Means over seeds of what was found, and of how it differs from all passes."""
    pairs = list(zip(full, found, strict=True))
    log_lik = [(float(p.log_prob(problem.y).mean()), float(q.log_prob(problem.y).mean())) for p, q in pairs]
    same = fmean(float((problem.decisions(p) == problem.decisions(q)).double().mean()) for p, q in pairs)
    record: dict[str, object] = {
        "passes": round(fmean(float(q.passes_used.double().mean()) for q in found), 2),
        "same_decisions": round(same, 5),
        "log_likelihood": round(fmean(q for _, q in log_lik), 4),
        "log_likelihood_full": round(fmean(p for p, _ in log_lik), 4),
        "seeds": len(pairs),
    }
    if problem.precision is None:
        return record | {"accuracy": round(fmean(float((q.label == problem.y).double().mean()) for q in found), 4)}
    covered = [(problem.coverage(p), problem.coverage(q)) for p, q in pairs]
    moved = [q - p for p, q in covered]
    spread = (sum((m - fmean(moved)) ** 2 for m in moved) / (len(moved) - 1) / len(moved)) ** 0.5
    return record | {
        "coverage90": round(fmean(q for _, q in covered), 3),
        "coverage90_moved": round(fmean(moved), 3),
        "coverage90_moved_error": round(spread, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true", help="the problems that the tolerances were chosen on")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, config = time.perf_counter(), Config(uci_seeds=5) if args.choose else Config()
    name, option = ("enough_chosen", " --choose") if args.choose else ("enough", "")
    rows = run(chosen_on(config), config, 1000) if args.choose else run(problems(config), config)
    out, command = args.out or Path(f"results/{name}.json"), f"python benchmarks/enough.py{option}"
    results.write(out, command=command, seed=config.seed, seconds=time.perf_counter() - start, rows=rows)


if __name__ == "__main__":
    main()
