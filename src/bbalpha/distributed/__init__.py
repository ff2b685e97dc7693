"""One model on many processes: rows shared among ranks, passes shared among ranks, or both.

    torchrun --nproc-per-node 4 train.py

    with processes():
        step = Step(net, bbalpha.CrossEntropy(alpha=0.5), spread=Spread(passes=2))     # 2 x 2: rows x passes
        loss = step(x, y, n_passes=10, seed=t)                                         # K passes are one forward
        loss.backward()

`bbalpha.fit(..., distributed=Spread(passes=2))` does all of it.
"""

from bbalpha.distributed.joining import RankLostError, device, processes
from bbalpha.distributed.ranks import Spread, rank_seed
from bbalpha.distributed.step import Step

__all__ = ["RankLostError", "Spread", "Step", "device", "processes", "rank_seed"]
