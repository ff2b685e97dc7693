"""What the paper has: its regression tables, and the sentences of its text that can be held against numbers."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Score:
    """A mean over splits or seeds, with its standard error where there is one."""

    mean: float
    error: float | None
    n: int = 0


@cache
def table() -> dict[tuple[str, str, str], Score]:
    """{(data set, metric, column): score} of the paper's two regression tables; columns are alpha=0.5, HMC, GP, ...

    >>> table()["boston", "nll", "alpha=0.5"]
    Score(mean=2.38, error=0.06, n=0)
    """
    with (Path(__file__).parent / "published.csv").open(encoding="utf-8") as file:
        return {
            (r["dataset"], r["metric"], r["method"]): Score(
                float(r["mean"]), None if r["stderr"] == "NA" else float(r["stderr"])
            )
            for r in csv.DictReader(file)
            if r["mean"] != "NA"
        }


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper about two networks: by each score, `first` is better than `second`, or like it."""

    words: str
    first: str
    second: str
    score: str
    alike: bool = False


# of the text beside the figures of MNIST, which have no numbers; "test RMSE" in it stands for the accuracy
CLAIMS = {
    "dense": (
        Claim("alpha = 0.5 has the best accuracy: better than alpha = 0", "alpha = 0.5", "alpha = 0", "accuracy"),
        Claim("alpha = 0.5 has the best accuracy: better than alpha = 1", "alpha = 0.5", "alpha = 1", "accuracy"),
        Claim("its log-likelihood matches that of alpha = 1", "alpha = 0.5", "alpha = 1", "total_log_likelihood", True),
        Claim("alpha = 0 has a worse log-likelihood than alpha = 0.5", "alpha = 0.5", "alpha = 0",
              "total_log_likelihood"),
        Claim("alpha = 0 has a worse log-likelihood than alpha = 1", "alpha = 1", "alpha = 0", "total_log_likelihood"),
        Claim("alpha = 0 has a worse accuracy than alpha = 1", "alpha = 1", "alpha = 0", "accuracy"),
    ),
    "cnn": (
        Claim("alpha = 0 seems to supersede alpha = 1: accuracy", "alpha = 0", "alpha = 1", "accuracy"),
        Claim("alpha = 0 seems to supersede alpha = 1: log-likelihood", "alpha = 0", "alpha = 1",
              "total_log_likelihood"),
        Claim("alpha = 0 is like alpha = 0.5: accuracy", "alpha = 0", "alpha = 0.5", "accuracy", True),
        Claim("alpha = 0 is like alpha = 0.5: log-likelihood", "alpha = 0", "alpha = 0.5",
              "total_log_likelihood", True),
    ),
}  # fmt: skip
# of the text on run time: (K, total log-likelihood, seconds within which or after which it is reached)
RUN_TIME = ((1, -600.0, 1000), (10, -600.0, 1000), (10, -500.0, 3000))
RUN_TIME_ACCURACY = 0.988
