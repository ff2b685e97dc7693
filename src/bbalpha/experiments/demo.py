"""The main job in two minutes: one small network, trained as everybody does and with alpha = 0, 0.5 and 1.

Digits (classification) and diabetes (regression) come with scikit-learn. The table shows what the uncertainty
is worth: the likelihood of the test rows, whether probabilities and intervals hold what they promise, and how
well inputs that were tampered with give themselves away.

    python -m bbalpha.experiments.demo            (or: make demo)
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bbalpha import metrics, plots
from bbalpha.experiments import results
from bbalpha.experiments.results import Row
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.prediction import predict_classification, predict_regression
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction
from bbalpha.training.fitting import fit


@dataclass(frozen=True)
class Config:
    """What the demo runs.

    Attributes:
        alphas: None is the plain network: no dropout, maximum likelihood.
        splits: Random splits into training and test rows, with a network each.
        epochs: (digits, diabetes).
        n_passes: K in training.
        seed: Of everything.
    """

    alphas: tuple[float | None, ...] = (None, 0.0, 0.5, 1.0)
    splits: int = 3
    epochs: tuple[int, int] = (60, 40)
    n_passes: int = 10
    seed: int = 0


Example = dict[str, tuple[ClassificationPrediction, Tensor, Tensor]]  # prediction, target, entropies of strange inputs


def run(config: Config, progress: bool = True) -> tuple[list[Row], Example]:
    """The rows of the table, and the digits predictions of the last split for the picture."""
    torch.manual_seed(config.seed)
    tasks = [
        (task, split, alpha)
        for task in (_digits, _diabetes)
        for split in range(config.splits)
        for alpha in config.alphas
    ]
    rows: list[Row] = []
    example: Example = {}
    with tqdm(tasks, disable=not progress, unit="net", desc="training") as bar:
        for task, split, alpha in bar:
            label = "plain network" if alpha is None else f"alpha = {alpha:g}"
            bar.set_postfix_str(f"{task.__name__[1:]}, {label}")
            scores, shown = task(config, split, alpha)
            rows.append({"dataset": task.__name__[1:], "method": "nn" if alpha is None else "bbalpha", "alpha": alpha,
                         "split": split, **scores})  # fmt: skip
            if shown is not None:
                example[label] = shown
    return rows, example


def _digits(config: Config, split: int, alpha: float | None) -> tuple[Row, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train, test = _split(len(x), 1000, split)
    # rates and epochs, here and below: best mean likelihood of the three alphas on held-out training rows of split 0
    net = mlp([64, 100, 100, 10], dropout=0.0 if alpha is None else 0.2, input_dropout=0.0 if alpha is None else 0.1)
    n_passes = None if alpha is None else config.n_passes
    fit(net, (x[train], y[train]), objective=CrossEntropy(alpha or 0.0), n_passes=n_passes, epochs=config.epochs[0],
        batch_size=100, length_scale=0.1, learning_rate=3e-3, progress=False)  # fmt: skip

    def predict(rows: Tensor) -> ClassificationPrediction:
        return predict_classification(net, rows, n_passes=None if alpha is None else 100, seed=0)

    p, q = predict(x[test]), predict(_tampered(x[test], split))
    scores = {
        "accuracy": metrics.accuracy(p.probs, y[test]),
        "nll": -p.log_prob(y[test]).mean(),
        "calibration_error": metrics.ece(p.probs, y[test]),
        "auroc_tampered": _found(p.entropy, q.entropy),
    }
    return scores, (p, y[test], q.entropy)


def _diabetes(config: Config, split: int, alpha: float | None) -> tuple[Row, None]:
    from sklearn.datasets import load_diabetes

    data, target = (torch.tensor(a, dtype=torch.float32) for a in load_diabetes(return_X_y=True))
    train, test = _split(len(data), 350, split)
    x = (data - data[train].mean(0)) / data[train].std(0)
    centre, unit = target[train].mean(), target[train].std()
    y = ((target - centre) / unit)[:, None]
    net = mlp([10, 50, 1], dropout=0.0 if alpha is None else 0.05)
    objective, n_passes = GaussianNLL(alpha or 0.0), None if alpha is None else config.n_passes
    fit(net, (x[train], y[train]), objective=objective, n_passes=n_passes, epochs=config.epochs[1], batch_size=50,
        length_scale=0.1, learning_rate=3e-3, progress=False)  # fmt: skip

    def predict(rows: Tensor) -> RegressionPrediction:
        tau, n_passes = objective.precision.item(), None if alpha is None else 100
        p = predict_regression(net, rows, n_passes=n_passes, precision=tau, seed=0)
        return p.rescaled(float(unit), float(centre))

    p, q = predict(x[test]), predict(_tampered(x[test], split))
    held = metrics.interval_coverage(*p.interval(0.9), target[test][:, None])
    scores = {
        "rmse": metrics.rmse(p.mean, target[test][:, None]),
        "nll": -p.log_prob(target[test][:, None]).mean(),
        "calibration_error": abs(float(held) - 0.9),
        "auroc_tampered": _found(p.std[:, 0], q.std[:, 0]),
    }
    return scores, None


def _split(n: int, n_train: int, split: int) -> tuple[Tensor, Tensor]:
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(split))
    return rows[:n_train], rows[n_train:]


def _tampered(x: Tensor, split: int) -> Tensor:
    """Every column shuffled by itself: the values are real, the rows are not."""
    generator = torch.Generator().manual_seed(1000 + split)
    return torch.stack([column[torch.randperm(len(x), generator=generator)] for column in x.T], 1)


def _found(clean: Tensor, strange: Tensor) -> float:
    positive = torch.arange(len(clean) + len(strange)) >= len(clean)
    return float(metrics.auroc(torch.cat([clean, strange]), positive))


# ------------------------------------------------------------------------------ table and picture


def table(rows: list[Row]) -> str:
    """The rows as text: means over splits with their standard errors."""
    lines = [f"{'':22}{'right / error':>16}{'log-likelihood':>18}{'calibration off by':>20}{'tampered found':>16}"]
    for dataset, score, form in (("digits", "accuracy", "{:.3f}"), ("diabetes", "rmse", "{:.1f}")):
        lines.append(f"{dataset} ({'RMSE' if score == 'rmse' else score})")
        for label, own in methods(rows, dataset):
            a, b, c, d = cells(own, score, form)
            lines.append(f"  {label:20}{a:>16}{b:>18}{c:>20}{d:>16}")
    lines.append(
        "means over splits ± standard error; log-likelihood of a test row: higher is better; "
        "tampered inputs found: AUROC, 0.5 is chance"
    )
    return "\n".join(lines)


def methods(rows: list[Row], dataset: str) -> Iterator[tuple[str, list[Row]]]:
    """(label, its rows) for the plain network and each alpha."""
    for alpha in dict.fromkeys(r["alpha"] for r in rows):
        label = "plain network" if alpha is None else f"alpha = {alpha:g}"
        yield label, [r for r in rows if r["dataset"] == dataset and r["alpha"] == alpha]


def cells(rows: list[Row], score: str, form: str) -> list[str]:
    """Score, log-likelihood, calibration error and AUROC as mean ± standard error over the rows."""
    others = [("nll", "{:.3f}", -1), ("calibration_error", "{:.3f}", 1), ("auroc_tampered", "{:.3f}", 1)]
    return [_cell(rows, *column) for column in [(score, form, 1), *others]]


def _cell(rows: list[Row], key: str, form: str, sign: int) -> str:
    values = torch.tensor([float(r[key]) for r in rows]) * sign
    error = values.std() / len(values) ** 0.5 if len(values) > 1 else torch.tensor(0.0)
    return f"{form.format(values.mean())} ± {form.format(error)}"


def picture(example: Example, path: Path) -> Path:
    """Reliability, and the entropy of real and of tampered digits, for the plain network and each alpha."""
    figure = plots.new_figure(13, 4.4)
    left, middle, right = figure.subplots(1, 3)
    plots.reliability_diagram(
        {k: metrics.reliability(p.probs, y, n_bins=8, adaptive=True) for k, (p, y, _) in example.items()}, ax=left
    )
    left.legend(frameon=False, loc="lower right", fontsize=8)
    for ax, label in ((middle, "plain network"), (right, "alpha = 0.5")):
        p, _, strange = example[label]
        plots.entropy_histogram({"test digits": p.entropy, "tampered digits": strange}, ax=ax)
        ax.set_title(f"Digits, {label}: how unsure?")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    """Run the demo, print the table, save the picture and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for demo.json and demo.png")
    parser.add_argument("--quick", action="store_true", help="one split, few epochs")
    options = parser.parse_args()
    config = Config(splits=1, epochs=(3, 3)) if options.quick else Config()
    torch.set_num_threads(1)  # small nets are faster so
    start = time.perf_counter()
    rows, example = run(config)
    seconds = time.perf_counter() - start
    data = results.write(
        options.out / "demo.json", command="make demo", seed=config.seed, seconds=seconds, rows=rows,
        settings=asdict(config),
    )  # fmt: skip
    image = picture(example, options.out / "demo.png")
    print(f"\n{table(rows)}\n\n{seconds:.0f} s. Numbers: {data}. Picture: {image}.")  # noqa: T201


if __name__ == "__main__":
    main()
