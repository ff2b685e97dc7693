"""Under bad input, faults and load: a campaign over the whole product -> results/torture.json; `make torture`.

    python -m tests.torture                             # all of it: at most 30 minutes on two cores
    python -m tests.torture downloads faults --size 0.1 --out /tmp/torture.json

A part is a module here with `run(size, seed) -> rows`: size 1 is the campaign, less does as much less, and what `make
test` runs is a part at a small size. A row is made by `rows.row`. What a part found is mended in the product, has a
test of its own beside the module that it is about, and a line in `found.py`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the helpers of the tests, as pytest has them too

PARTS: tuple[str, ...] = ("calls", "commands", "bodies", "downloads", "folders", "faults", "service")
