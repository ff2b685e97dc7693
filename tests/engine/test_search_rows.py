"""A random search over architectures and sizes: `sample` and `predict_*` give what loops by hand give.

`BBALPHA_SEARCH_CASES=1000 pytest tests/test_search_rows.py` looks for longer, and so does `-m slow`;
`BBALPHA_SEARCH_FIRST` begins at another case. A failure names its cases: `search([i])` runs case i alone.
"""

import os
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import bbalpha
from architectures import Case, random_case

CASES = 30  # about 6 s
MANY = 5000
FOUND = (1000682, 1003089, 1003546, 1004049, 3001967, 3028706)  # by longer searches: a mask of one step, stretched
K = 3
LAWS = (
    "sample by auto", "sample by loop", "sample by vmap", "sample by repeat", "shared by auto", "shared by loop",
    "predict_classification", "predict_regression", "shared predictions for any batch_size", "nothing is touched",
)  # fmt: skip


def search(cases: Iterable[int]) -> "Findings":
    """All laws on all cases."""
    found = Findings()
    for i in cases:
        rng = random.Random(i)
        found.look(i, random_case(rng), rng)
    return found


class Findings:
    """What broke a law, and what was refused: [(case, kinds, what happened)]."""

    def __init__(self) -> None:
        self.broken: dict[str, list[tuple[int, tuple[str, ...], str]]] = {law: [] for law in LAWS}
        self.refused: list[tuple[int, tuple[str, ...], str]] = []
        self.served: Counter[str] = Counter()  # comparisons made under each law
        self.cases = 0

    def look(self, i: int, case: Case, rng: random.Random) -> None:
        """One case, by the cheapest and most used ways and one of the others each."""
        self.cases += 1
        before = _state(case)
        seed = rng.randrange(1000)
        own, shared = (case.oracle(seed, K, masks) for masks in (False, True))
        apart: dict[str, Any] = {"seed": seed, "batch_dim": case.batch_dim}
        together = {**apart, "masks": "shared"}
        self._compare(i, case, "sample by auto", own, _sample, **apart)
        self._compare(i, case, "shared by auto", shared, _sample, **together)
        strategy = rng.choice(("loop", "vmap", "repeat", "shared"))
        if strategy == "shared":
            self._compare(i, case, "shared by loop", shared, _sample, strategy="loop", **together)
        else:
            self._compare(i, case, f"sample by {strategy}", own, _sample, strategy=strategy, **apart)
        options, passes = rng.choice(((apart, own), (together, shared)))
        passes = case.rows_first(passes)  # (K, N, ...)
        if rng.random() < 0.5:
            self._compare(i, case, "predict_regression", passes, _regression, **options)
        else:
            probs = passes.softmax(case.class_axis).mean(0)
            self._compare(i, case, "predict_classification", probs, _classification, **options)
        size = rng.randint(1, max(1, case.n - 1))
        law = "shared predictions for any batch_size"
        self._compare(i, case, law, case.rows_first(shared), _regression, batch_size=size, **together)
        if not _same_state(before, _state(case)):
            self.broken["nothing is touched"].append((i, case.kinds, "flags, buffers or inputs changed"))

    def told(self, law: str) -> str:
        """What broke `law`, for people."""
        lines = [f"  case {i} {kinds}: {what}" for i, kinds, what in self.broken[law][:8]]
        return "\n".join((f"{law}: {len(self.broken[law])} of {self.cases} cases", *lines))

    def _compare(self, i: int, case: Case, law: str, expected: Tensor, call: Any, **options: Any) -> None:
        try:
            got = call(case, **options)
        except ValueError as error:
            if "does not fit this model" in str(error) and options.get("strategy") in ("vmap", "repeat"):
                return
            may = case.two_axes or (case.folds and case.interacts)
            if may and options.get("masks") == "shared" and '`masks="shared"`' in str(error):  # it says why not
                self.refused.append((i, case.kinds, str(error)))
            else:
                self.broken[law].append((i, case.kinds, f"ValueError: {error}"))
        # whatever a wrong guess of the rows makes of a model is a finding
        except Exception as error:  # noqa: BLE001
            self.broken[law].append((i, case.kinds, f"{type(error).__name__}: {error}"))
        else:
            self.served[law] += 1
            if got.shape != expected.shape:
                self.broken[law].append((i, case.kinds, f"{tuple(got.shape)} instead of {tuple(expected.shape)}"))
            elif not torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
                self.broken[law].append((i, case.kinds, f"off by {float((got - expected).abs().max()):.3g}"))


def _sample(case: Case, **options: Any) -> Tensor:
    return bbalpha.sample(case.model, case.x, K, **options)


def _regression(case: Case, **options: Any) -> Tensor:
    return bbalpha.predict_regression(case.model, case.x, n_passes=K, progress=False, **options).outputs


def _classification(case: Case, **options: Any) -> Tensor:
    return bbalpha.predict_classification(
        case.model, case.x, n_passes=K, class_axis=case.class_axis, progress=False, **options
    ).probs


def _state(case: Case) -> list[Any]:
    modules = [(name, m.training) for name, m in case.model.named_modules()]
    kept = [t.clone() for t in (*case.model.state_dict().values(), *case.arguments().values())]
    return [modules, torch.get_rng_state(), *kept]


def _same_state(a: list[Any], b: list[Any]) -> bool:
    return a[0] == b[0] and len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a[1:], b[1:], strict=True))


# ------------------------------------------------------------------------------ the search and its laws


@pytest.fixture(scope="module")
def found():
    first = int(os.environ.get("BBALPHA_SEARCH_FIRST", "0"))
    with torch.no_grad():
        return search((*FOUND, *range(first, first + int(os.environ.get("BBALPHA_SEARCH_CASES", CASES)))))


@pytest.mark.parametrize("law", LAWS)
def test_no_case_breaks_the_law(found, law):
    assert not found.broken[law], found.told(law)


@pytest.mark.slow
def test_many_cases_break_no_law():
    with torch.no_grad():
        found = search(range(10**6, 10**6 + MANY))
    assert not any(found.broken.values()), "\n".join(found.told(law) for law in LAWS if found.broken[law])


def test_every_law_was_tried(found):
    tried = {law: found.served[law] + len(found.broken[law]) for law in LAWS[:-1]}
    assert all(tried.values()), tried


def test_refusals_are_few(found):
    assert len({i for i, *_ in found.refused}) <= 0.2 * found.cases


# ------------------------------------------------------------------------------ the oracle


@pytest.fixture(scope="module")
def cases():
    return [random_case(random.Random(i)) for i in range(150)]


def test_the_oracle_without_draws_is_the_model_in_evaluation_mode(cases):
    for case in cases:
        with torch.no_grad():
            torch.testing.assert_close(case.oracle(None, 1, False)[0], case.model(**case.arguments()))


def test_the_oracle_shares_one_function_among_rows(cases):
    alone = [case for case in cases if not case.interacts]
    assert len(alone) > 50
    for case in alone:
        together = case.rows_first(case.oracle(0, 2, True))
        for r in range(case.n):
            one = case.rows_first(case.oracle(0, 2, True, slice(r, r + 1)))
            torch.testing.assert_close(together[:, r : r + 1], one, rtol=1e-4, atol=1e-5)


def test_sizes_coincide_often(cases):
    equal = Counter()
    for case in cases:
        s = case.model.s
        equal["time"] += case.n == s.t > 1
        equal["heads"] += case.n == s.heads > 1
        equal["multiple"] += case.n > 1 and s.d % case.n == 0
        equal["classes"] += case.n == case.model.head.out_features
    assert all(count >= 15 for count in (equal[k] for k in ("time", "heads", "multiple", "classes")))
