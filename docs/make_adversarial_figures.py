"""The figures of docs/adversarial.md, from results/adversarial: run `python docs/make_adversarial_figures.py`.

Strips of images need the .npz files that `bbalpha reproduce adversarial` leaves beside its numbers.
"""

from pathlib import Path

from bbalpha.experiments import adversarial_figures

if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    for path in adversarial_figures.draw(root / "results/adversarial", root / "docs/figures"):
        print(path.relative_to(root))
