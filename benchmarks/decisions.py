"""The three worked decisions of docs/which-number.md -> results/decisions.json, and the tables of that guide.

    BBALPHA_DATA=... python benchmarks/decisions.py

Abstain and ask for a label: scikit-learn's digits. Safety margin: concrete, strength in MPa. One thread, about five
minutes. The guide's tables are written from the JSON, between its markers.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bbalpha
from bbalpha import acquisition, metrics
from bbalpha.calibration import conformal_intervals
from bbalpha.experiments import results
from bbalpha.networks import mlp

Row = dict[str, float | str | int]
TOGETHER: dict[str, Callable[[Any], Tensor]] = {
    "bald, shared masks": lambda probs: acquisition.top(acquisition.bald(probs), 10).indices,
    "batch_bald": lambda probs: acquisition.batch_bald(probs, 10, seed=0).indices,
    "power_bald": lambda probs: acquisition.power_bald(probs, 10, seed=0).indices,
}


def train_classifier(x: Tensor, y: Tensor, *, steps: int) -> nn.Module:
    """A 64-100-10 net fitted with alpha = 0.5."""
    net = mlp([64, 100, 10], dropout=0.2, input_dropout=0.0)
    optimizer = torch.optim.Adam(bbalpha.param_groups(net, length_scale=0.1, n_data=len(x)), lr=5e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (min(64, len(x)),))
        loss = bbalpha.cross_entropy(bbalpha.sample(net, x[rows], n_passes=10), y[rows], alpha=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """The 1797 digits, shuffled: x (N, 64), y (N,)."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]


def abstain(seed: int) -> list[Row]:
    """Errors among the rows kept, when a share of the least sure goes to a person."""
    x, y = digits(seed)
    net = train_classifier(x[:300], y[:300], steps=400)
    p = bbalpha.predict_classification(net, x[300:], seed=0)
    wrong = (p.label != y[300:]).float()
    scores = {"entropy": p.entropy, "mutual_information": p.mutual_information, "random": torch.rand(len(wrong))}
    rows: list[Row] = []
    for score, uncertainty in scores.items():
        curve = metrics.risk_coverage(uncertainty, wrong)
        for kept in (1.0, 0.95, 0.9, 0.8):
            risk = curve.risk[round(kept * len(wrong)) - 1].item()
            rows.append({"work": "abstain", "way": score, "seed": seed, "kept": kept, "error": risk})
    return rows


def ask(seed: int) -> list[Row]:
    """Accuracy after labels were asked for, 10 a round from 20 on: where each score is largest, or ten together."""
    x, y = digits(seed)
    pool, x_test, y_test = torch.arange(1000), x[1000:], y[1000:]
    y_pool = y.clone()
    noisy = torch.rand(1000) < 0.5  # half of the pool: smudged digits, whose label is anybody's guess
    smudged = x.clone()
    smudged[pool[noisy]] = 0.5 * x[pool[noisy]] + 0.5 * torch.rand(int(noisy.sum()), 64)
    y_pool[pool[noisy]] = torch.randint(10, (int(noisy.sum()),))
    rows: list[Row] = []
    for score in ("mutual_information", "entropy", "random"):
        rows += asked(score, seed, (smudged[:1000], y_pool[:1000], noisy), (x_test, y_test))
    with torch.random.fork_rng():  # what follows draws as it did before there were these
        for score in TOGETHER:
            rows += asked(score, seed, (smudged[:1000], y_pool[:1000], noisy), (x_test, y_test))
    return rows


def asked(way: str, seed: int, pool: tuple[Tensor, Tensor, Tensor], test: tuple[Tensor, Tensor]) -> list[Row]:
    """Rounds of ten labels, from 20 to 100, asked for in one way."""
    x, y, noisy = pool
    rows: list[Row] = []
    torch.manual_seed(seed)
    known = torch.randperm(1000)[:20]
    for labels in range(20, 101, 10):
        net = train_classifier(x[known], y[known], steps=150)
        if labels in (20, 60, 100):
            p = bbalpha.predict_classification(net, test[0], n_passes=50, seed=0)
            accuracy = metrics.accuracy(p.probs, test[1]).item()
            share = noisy[known].float().mean().item()
            rows.append(
                {"work": "ask", "way": way, "seed": seed, "labels": labels, "accuracy": accuracy, "wasted": share}
            )
        known = torch.cat((known, next_ten(way, net, x, known)))
    return rows


def next_ten(way: str, net: nn.Module, x: Tensor, known: Tensor) -> Tensor:
    """The rows of the pool whose labels are asked for next."""
    if way in TOGETHER:  # passes as functions: only so does it mean something what two rows tell together
        left = torch.ones(len(x), dtype=torch.bool)
        left[known] = False
        rows = left.nonzero()[:, 0]
        probs = bbalpha.Functions(net, n_passes=100, seed=0).probs(x[rows])
        return rows[TOGETHER[way](probs)]
    p = bbalpha.predict_classification(net, x, n_passes=50, seed=0)
    value = torch.rand(1000) if way == "random" else getattr(p, way).clone()
    value[known] = -1.0
    return value.topk(10).indices


def margin(split: int, folder: str) -> list[Row]:
    """The strength to promise: how much is promised, and how often less is delivered, by three margins."""
    from conformal import Config, TwoHeads, train

    config = Config()
    data = np.load(Path(folder) / "uci" / "concrete.npz", allow_pickle=False)
    X, y = torch.from_numpy(data["X"]).float(), torch.from_numpy(data["y"]).float()[:, None]
    test = torch.from_numpy(data["test_mask"][split])
    order = torch.nonzero(~test).squeeze(1)
    order = order[torch.randperm(len(order))]
    held, training = order[:230], order[230:]
    inputs = (X - X[training].mean(0)) / X[training].std(0)
    centre, scale = y[training].mean(), y[training].std()
    net: TwoHeads = train(inputs[training], (y[training] - centre) / scale, config)
    p_held, p = (
        bbalpha.predict_regression(net, inputs[rows], precision="predicted", seed=0).rescaled(scale, centre)
        for rows in (held, torch.nonzero(test).squeeze(1))
    )
    constant = conformal_intervals(p_held, y[held], coverage=0.9, score="absolute").interval(p)[0]
    adaptive = conformal_intervals(p_held, y[held], coverage=0.9).interval(p)[0]
    promises = {"mean": p.mean, "quantile(0.05)": p.quantile(0.05), "conformal": adaptive, "constant margin": constant}
    return [
        {
            "work": "margin",
            "way": way,
            "seed": split,
            "promised": promise.mean().item(),
            "missed": (y[test] < promise).float().mean().item(),
        }
        for way, promise in promises.items()
    ]


# ------------------------------------------------------------------------------ the guide


def tables(rows: list[Row]) -> dict[str, str]:
    """The tables of the guide, by marker."""

    def mean(key: str, **where: float | str) -> float:
        return float(np.mean([float(r[key]) for r in rows if all(r.get(k) == v for k, v in where.items())]))

    ways = {
        work: list(dict.fromkeys(str(r["way"]) for r in rows if r["work"] == work))
        for work in ("abstain", "ask", "margin")
    }
    kept, labels = (1.0, 0.95, 0.9, 0.8), (20, 60, 100)
    return {
        "abstain": _table(
            ["least sure by", *(f"errors, {k:.0%} kept" for k in kept)],
            [[w, *(f"{mean('error', work='abstain', way=w, kept=k):.1%}" for k in kept)] for w in ways["abstain"]],
        ),
        "ask": _table(
            ["labels asked by", *(f"accuracy, {n} labels" for n in labels), "of these unusable"],
            [
                [
                    w,
                    *(f"{mean('accuracy', work='ask', way=w, labels=n):.1%}" for n in labels),
                    f"{mean('wasted', work='ask', way=w, labels=100):.0%}",
                ]
                for w in ways["ask"]
            ],
        ),
        "margin": _table(
            ["promise", "promised on average (MPa)", "less delivered"],
            [
                [w, f"{mean('promised', work='margin', way=w):.1f}", f"{mean('missed', work='margin', way=w):.1%}"]
                for w in ways["margin"]
            ],
        ),
    }


def conformal_table(rows: list[Row]) -> str:
    """Coverage and width by data set, means over its splits, from the rows of conformal.py."""
    body = []
    for dataset in dict.fromkeys(str(r["dataset"]) for r in rows):
        cells, widths = [dataset], []
        for score in ("quantile", "absolute"):
            own = [r for r in rows if r["dataset"] == dataset and r["score"] == score]
            widths.append(np.array([float(r["width"]) for r in own]))  # by split
            cells += [f"{np.mean([float(r['coverage90']) for r in own]):.1%}", f"{widths[-1].mean():.3g}"]
        saved = widths[1] - widths[0]
        error = saved.std(ddof=1) / np.sqrt(len(saved))
        body.append([*cells, f"{saved.mean():.2g} ± {error:.1g}, in {(saved > 0).sum()} of {len(saved)} splits"])
    head = ["data set", "conformal: covers", "width", "constant width: covers", "width", "narrower by"]
    return _table(head, body)


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(f"`{c}`" if "_" in c else c for c in line) + " |" for line in lines)


def fill(guide: Path, rows: list[Row], conformal: list[Row]) -> None:
    """Write the tables between `<!-- name -->` and `<!-- end -->`."""
    text = guide.read_text()
    for name, table in {**tables(rows), "conformal": conformal_table(conformal)}.items():
        text, found = re.subn(
            rf"(<!-- {name}\b[^>]*-->\n).*?(<!-- end -->)",
            lambda m, t=table: m[1] + t + "\n" + m[2],
            text,
            flags=re.DOTALL,
        )
        if found != 1:
            raise ValueError(f"{guide} must have one place for the table {name!r}; got {found}.")
    guide.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/decisions.json"))
    parser.add_argument("--guide", type=Path, default=Path("docs/which-number.md"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only-tables", action="store_true", help="from the JSON as it is")
    args = parser.parse_args()
    if args.only_tables:
        fill(args.guide, results.read(args.out)["rows"], results.read(args.out.with_name("conformal.json"))["rows"])
        return
    if "BBALPHA_DATA" not in os.environ:
        sys.exit("BBALPHA_DATA must name the folder of data sets")
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows: list[Row] = []
    for seed in range(args.repeats):
        torch.manual_seed(seed)
        rows += abstain(seed) + ask(seed) + margin(seed, os.environ["BBALPHA_DATA"])
        print(f"repeat {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    command = "python benchmarks/decisions.py"
    results.write(args.out, command=command, seed=0, seconds=time.perf_counter() - start, rows=rows)
    fill(args.guide, rows, results.read(args.out.with_name("conformal.json"))["rows"])


if __name__ == "__main__":
    main()
