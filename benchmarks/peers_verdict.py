"""What one way makes of one model, measured: `measure(case, way)`; and the word for it: `verdict(facts)`.

The yardstick is a loop of the model itself, put into training mode as a whole, its normalisations (which must not
move) in evaluation mode: written by what is known of these models, without any part of bbalpha. A way is told by

- whether its passes differ, and are others when it is run again;
- how many random numbers they draw, operator by operator, seen by a dispatch mode: where a site is silent, or one draw
  serves all passes, these are fewer than the yardstick's. bbalpha draws by kernels of its own: `audit` tells instead;
- the mean and the spread of its passes, by a test against those of the yardstick;
- buffers, parameters and outputs of the model in evaluation mode before and afterwards, and the flags it is left with.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from peers_ways import OURS, WAYS, Way, call, leaves, stacked
from peers_zoo import Case
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import bbalpha

N_PASSES, N_COUNTED, SEED = 100, 8, 0
SURE = 5.0  # standard errors
FACTOR = 1.25  # of the spread, below which a difference is not called one


@dataclass(frozen=True)
class Facts:
    """What was seen of one way and one model; None where it could not be seen.

    Attributes:
        error: What was raised, in one line.
        differ: Whether passes differ, by chance.
        silent: Whether a random site drew nothing, or once for all passes.
        spread: Variance of the passes, by that of the yardstick.
        off: Whether mean or spread are not the yardstick's.
        altered: Whether buffers, parameters or outputs in evaluation mode are other ones afterwards.
        flags: Whether modules or their training flags are other ones afterwards.
        warned: What was warned of, in one line each.
    """

    error: str = ""
    differ: bool | None = None
    silent: bool | None = None
    spread: float | None = None
    off: bool | None = None
    altered: bool | None = None
    flags: bool | None = None
    warned: str = ""


def verdict(f: Facts) -> str:
    """One word for it; the first that holds."""
    if f.error:
        return "error"
    if not f.differ:
        return "not sampled, warned" if f.warned else "silently not sampled"
    if f.altered:
        return "changed the model"
    if f.silent:
        return "partly"
    return "other outputs" if f.off else "sampled"


# ------------------------------------------------------------------------------ measuring


def measure(case: Case, name: str) -> Facts:
    """What the way `name` makes of a model."""
    wanted, _ = yardstick(case)
    model, x = made(case)
    before = State.of(model, x)
    torch.manual_seed(SEED + 1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            with torch.no_grad():
                got = flat(WAYS[name](model, fresh(x), N_PASSES, case.batch_dim))
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is what a user sees
            return Facts(error=f"{type(error).__name__}: {first_line(error)}", warned=told(heard))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flags, altered = before.compared(model, x)
        silent = silent_by_audit(case) if name == OURS else silent_by_counting(case, WAYS[name])
        chance = by_chance(case, WAYS[name])
    spread, off = compared(got, wanted)
    return Facts("", differs(got) and chance, silent, spread, off, altered, flags, told(heard))


def made(case: Case) -> tuple[nn.Module, Any]:
    """The model, in evaluation mode, and its input; the same ones every time."""
    torch.manual_seed(SEED)
    model, x = case.make()
    return model.eval(), x


@cache
def yardstick(case: Case) -> tuple[Tensor, list[Counter[str]]]:
    """Passes of the model by hand (K, F), and the random numbers that some of them drew."""
    model, x = made(case)
    case.prepare(model)
    torch.manual_seed(SEED + 2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        passes = stacked([call(model, fresh(x)) for _ in range(N_PASSES)])
        return flat(passes), [counted(lambda: call(model, fresh(x))) for _ in range(N_COUNTED)]


def fresh(x: Any) -> Any:
    """A copy of an input, for models that work in place."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)


def differs(outputs: Tensor) -> bool:
    """Whether passes (K, F) differ by more than rounding."""
    return not torch.allclose(outputs, outputs[:1].expand_as(outputs), rtol=1e-5, atol=1e-7)


def by_chance(case: Case, way: Way) -> bool:
    """Whether the passes are others with another seed: those of a batch on the wrong axis differ for no such reason."""
    found = []
    for seed in (SEED + 3, SEED + 4):
        model, x = made(case)
        torch.manual_seed(seed)
        found.append(flat(way(model, x, N_COUNTED, case.batch_dim)))
    return differs(torch.stack(found).flatten(1))


def flat(outputs: list[Tensor]) -> Tensor:
    """(K, numbers of a pass)."""
    return torch.cat([leaf.flatten(1).double() for leaf in outputs], 1)


def compared(got: Tensor, wanted: Tensor) -> tuple[float | None, bool]:
    """Variance as a multiple of that wanted, and whether it or any mean is another one."""
    if got.shape[1] != wanted.shape[1]:
        return None, True
    (mean, error, spread, doubt), (mean_0, error_0, spread_0, doubt_0) = moments(got), moments(wanted)
    apart = (mean - mean_0).abs() / (error.square() + error_0.square() + 1e-12).sqrt()
    ratio = spread / spread_0 if spread_0 else float("inf")
    wider = abs(spread - spread_0) / max((doubt**2 + doubt_0**2) ** 0.5, 1e-12) > SURE
    return ratio, bool(apart.max() > SURE + 1) or (wider and not 1 / FACTOR < ratio < FACTOR)


def moments(outputs: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Means and their standard errors (F,); the variance of all numbers together, and its standard error."""
    away = (outputs - outputs.mean(0)).square()  # (K, F)
    n, each = len(outputs), away.sum(1)
    return outputs.mean(0), (away.sum(0) / (n - 1) / n).sqrt(), float(each.mean()), float(each.std() / n**0.5)


# ------------------------------------------------------------------------------ which sites are silent


class Counted(TorchDispatchMode):
    """Counts the random numbers that are drawn, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.drawn[func._schema.name] += sum(t.numel() for t in leaves(out)) or 1
        return out


def counted(run: Callable[[], object]) -> Counter[str]:
    with Counted() as mode:
        run()
    return mode.drawn


def silent_by_counting(case: Case, way: Way) -> bool | None:
    """Whether passes draw less than the yardstick's poorest pass, by any operator."""
    _, each = yardstick(case)
    model, x = made(case)
    drawn = counted(lambda: way(model, x, N_COUNTED, case.batch_dim))
    if not any(each):
        return None
    return any(drawn[op] < N_COUNTED * min(c[op] for c in each) for op in set().union(*each))


def silent_by_audit(case: Case) -> bool:
    model, x = made(case)
    return bool(bbalpha.audit(model, x, batch_dim=case.batch_dim).silent)


# ------------------------------------------------------------------------------ what is changed


@dataclass(frozen=True)
class State:
    """A model as it was: numbers it keeps, what it computes in evaluation mode, its modules and their flags."""

    kept: dict[str, Tensor]
    flags: dict[str, tuple[str, bool]]
    outputs: list[Tensor] | None  # None: they are random in evaluation mode too

    @classmethod
    def of(cls, model: nn.Module, x: Any) -> "State":
        with torch.no_grad():
            first, second = leaves(call(model, fresh(x))), leaves(call(model, fresh(x)))
        kept = {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        flags = {name: (type(m).__name__, m.training) for name, m in model.named_modules()}
        return cls(kept, flags, first if same(first, second) else None)

    def compared(self, model: nn.Module, x: Any) -> tuple[bool, bool]:
        """Whether flags are other ones; whether, back in evaluation mode, numbers or outputs are."""
        flags = {name: (type(m).__name__, m.training) for name, m in model.named_modules()}
        now = State.of(model.eval(), x)
        moved = self.kept.keys() != now.kept.keys() or not same(list(self.kept.values()), list(now.kept.values()))
        other = self.outputs is not None and (now.outputs is None or not same(self.outputs, now.outputs))
        return flags != self.flags, moved or other


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.allclose(s, t, equal_nan=True) for s, t in zip(a, b, strict=True))


# ------------------------------------------------------------------------------ words


def first_line(error: Exception | Warning | str) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def told(heard: list[warnings.WarningMessage]) -> str:
    """Warnings that are meant for the user of a model, each once."""
    once = dict.fromkeys(first_line(w.message) for w in heard if issubclass(w.category, UserWarning))
    return " | ".join(list(once)[:3])
