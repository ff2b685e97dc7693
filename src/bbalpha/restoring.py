"""What was changed is put back, also where an interrupt hits the putting back.

with Restoring(put_back), Restoring(put_back):   # the inner one may be cut short: the outer one does it again
    ...
"""

from collections.abc import Callable


class Restoring:
    """A context that calls `restore` on its way out; `restore` must do no harm when it is called twice.

    Ctrl-C can strike anywhere, inside a ``finally`` too. Of two contexts, one inside the other, one always ends.

    >>> with Restoring(lambda: print("back")):
    ...     print("there")
    there
    back
    """

    def __init__(self, restore: Callable[[], object]) -> None:
        self.restore = restore

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.restore()
