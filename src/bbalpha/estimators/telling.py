"""How far a race is: a bar where there is a terminal, lines where there is none."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm


class Teller:
    """Tells what is being tried on stderr, or nothing."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.bar: Any = tqdm(unit="network", disable=not (verbose and sys.stderr.isatty()), leave=False)
        self.begun = 0

    def expect(self, n_networks: int) -> None:
        """So many networks are still to come."""
        self.bar.total = self.bar.n + n_networks
        self.bar.refresh()

    def tell(self, what: str, n_networks: int) -> None:
        """So many networks are being trained now; those before are done."""
        self.bar.update(self.begun)
        self.begun = n_networks
        self.bar.set_postfix_str(what)
        if self.verbose and self.bar.disable:
            tqdm.write(what, file=sys.stderr)


@contextmanager
def telling(verbose: bool) -> Iterator[Teller]:
    """A teller, whose bar is gone afterwards."""
    teller = Teller(verbose)
    try:
        yield teller
    finally:
        teller.bar.close()
