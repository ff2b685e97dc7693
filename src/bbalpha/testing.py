"""For the tests of a model: does it sample? A dropout that is skipped fails the test instead of being believed.

    from bbalpha.testing import assert_samples

    def test_my_network_samples():
        assert_samples(make_network(), torch.randn(8, 20))

pytest has it as a fixture of the same name, without an import. `bbalpha doctor` prints what it looks at.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from bbalpha._engine.inputs import BatchDim
    from bbalpha.convert import Audit


def assert_samples(model: "nn.Module", x: Any, *, silent: Collection[str] = (), batch_dim: "BatchDim" = 0) -> None:
    """Raise AssertionError unless the passes of `model` on `x` differ and each of its random sites draws.

    Nothing is changed, the generators included; `model` may be in training or in evaluation mode. A rate of 0 is a
    setting, not a fault, as long as another site draws.

    Args:
        model: Any module.
        x: As for `sample`; so many rows that a low rate drops something.
        silent: Names, as in named_modules, of sites that rightly draw nothing on `x`: of a head it does not reach.
        batch_dim: The axis of `x` that counts the rows.

    >>> import torch
    >>> from torch import nn
    >>> assert_samples(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)), torch.randn(8, 4))
    >>> assert_samples(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 1)), torch.randn(8, 4))
    Traceback (most recent call last):
    AssertionError: Sequential does not sample: ...off: 1 (dropout, rate 0.0)...
    """
    __tracebackhide__ = True  # pytest shows the caller's line, and the sentence
    from bbalpha.convert import audit

    fault = _fault(audit(model, x, batch_dim=batch_dim), {silent} if isinstance(silent, str) else set(silent))
    if fault:
        raise AssertionError(f"{type(model).__name__} does not sample{fault}")


def _fault(found: "Audit", expected: set[str]) -> str:
    """What is wrong, as the end of a sentence; empty where nothing is."""
    if not found.differed:
        return f": {found.warnings[-1] if found.warnings else '`x` has no rows to draw for.'}"
    skipped = [why for name, why in found.silent.items() if name not in expected]
    if skipped:
        return f" everywhere: {'; '.join(skipped)}. Mend it, set its rate to 0, or name it in `silent`."
    drawing = sorted(expected - found.silent.keys())
    if drawing:
        return f" as told: `silent` must name sites that draw nothing at a rate above 0; got {', '.join(drawing)}."
    return ""
