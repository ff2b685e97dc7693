"""How far balancing single units can get at all -> results/passes_floor.json.

    python benchmarks/passes_floor.py [--quick]

The output of a pass is a sum of what each unit does by itself and of what units do only together (Hoeffding). Balanced
masks settle the first part where pK is a whole number. Two units that are dropped in pK passes each are both dropped in
K p^2 passes on average. Where that is below one the count is 0 or 1, and no masks whose every pass is plain dropout can
make it vary less than chance does. So the root of the share of the second part is what is left of the error.

The share is found from many independent passes of the UCI networks of passes.py: outputs of those in which a unit is
dropped, against the others. Masks are shared by all rows, to be known. What is in the output is not computed again.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from passes_networks import NETWORKS, Problem
from torch import Tensor, nn

from bbalpha.experiments import skeleton
from bbalpha.experiments.results import Row

RATE = 0.05
BLOCK = 2000  # passes at a time


@dataclass(frozen=True)
class Network(skeleton.Unit):
    network: str


@torch.no_grad()
def passes(net: nn.Sequential, x: Tensor, n_passes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Outputs of independent passes (K, N) and which units each has dropped (K, units)."""
    masks, hidden = [], x[None]
    for layer in net:
        if isinstance(layer, nn.Dropout):
            dropped = torch.rand(n_passes, hidden.shape[-1], generator=generator) < layer.p
            hidden = hidden * (~dropped[:, None]) / (1 - layer.p)
            masks.append(dropped[:, : hidden.shape[-1] if layer.p else 0])
        else:
            hidden = layer(hidden)
    return hidden[..., 0].double(), torch.cat(masks, 1).double()


def first_order_share(problem: Problem, n_passes: int, seed: int = 0) -> tuple[float, float]:
    """The share of the variance over passes that units make by themselves, and its standard error over ten parts."""
    if not isinstance(problem.net, nn.Sequential):
        raise TypeError(f"`net` must be an nn.Sequential; got {type(problem.net).__name__}.")
    net = problem.net.cpu()
    generator = torch.Generator().manual_seed(seed)
    shares = []
    for _ in range(10):
        total, square, dropped, count = 0.0, 0.0, 0.0, 0.0
        for _ in range(n_passes // 10 // BLOCK):
            outputs, masks = passes(net, problem.held_out, BLOCK, generator)
            total, square = total + outputs.sum(0), square + outputs.square().sum(0)  # (N,)
            dropped, count = dropped + masks.T @ outputs, count + masks.sum(0)  # (units, N), (units,)
        shares.append(_share(n_passes // 10 // BLOCK * BLOCK, total, square, dropped, count[:, None]))
    found = torch.tensor(shares)
    return found.mean().item(), (found.std() / math.sqrt(len(found))).item()


def _share(n: int, total: Tensor, square: Tensor, dropped: Tensor, count: Tensor) -> float:
    """Sum over units of p (1 - p) (mean where dropped - mean where kept)^2, less its noise, over the variance."""
    variance = square / n - (total / n).square()  # (N,)
    apart = dropped / count - (total - dropped) / (n - count)  # (units, N)
    noise = variance * (1 / count + 1 / (n - count))
    p = count / n
    single = (p * (1 - p) * (apart.square() - noise)).sum(0)
    return float(single.sum() / variance.sum())


def rows_of(name: str, *, quick: bool) -> list[Row]:
    """The row of a network."""
    torch.manual_seed(0)
    n_passes = 20 * BLOCK if quick else 200 * BLOCK
    share, error = first_order_share(NETWORKS[name](), n_passes)
    floor = math.sqrt(max(1 - share, 0.0))
    return [{"network": name, "passes": n_passes, "first_order": share, "first_order_error": error, "floor": floor}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one network, a tenth of the passes: for a test")
    parser.add_argument("--out", type=Path, default=Path("results/passes_floor.json"))
    args = parser.parse_args()
    kept = skeleton.open_ledger(args.out, command="python benchmarks/passes_floor.py", quick=args.quick, seed=0)
    names = [name for name in NETWORKS if f", {RATE}" in name and "encoder" not in name]

    def work(unit: Network, _: Path) -> list[Row]:
        with skeleton.threads(1):
            return rows_of(unit.network, quick=args.quick)

    units = [Network(name) for name in (names[:1] if args.quick else names)]
    skeleton.run_units(kept, units, work, state=args.out.parent / ".state" / "passes_floor")
    for row in kept.rows:
        print(f"{row['network']:30} first order {row['first_order']:.4f} ± {row['first_order_error']:.4f}")


if __name__ == "__main__":
    main()
