"""A command of bbalpha as a rank of test_pieces.py: torchrun dealt.py FOLDER fit ...; how many pieces it took."""

import os
import sys
from pathlib import Path

from bbalpha import _spread, cli


def main():
    taken, folder, alone = [], Path(sys.argv.pop(1)), _spread._alone

    def counted(work, piece, threads):
        taken.append(piece)
        return alone(work, piece, threads)

    counted.__module__, counted.__qualname__ = alone.__module__, alone.__qualname__  # it is sent by its name
    _spread._alone = counted
    try:
        cli.main()
    finally:
        (folder / f"rank{os.environ['RANK']}").write_text(str(len(taken)))


if __name__ == "__main__":
    main()
