"""The figures of docs/mnist.md from results/: run `python docs/make_mnist_figures.py` from the repository root."""

from pathlib import Path

from bbalpha.experiments import classification, results, runtime

ROOT = Path(__file__).resolve().parent.parent
FIGURES = {
    "classification/dense.json": (classification.figure, "mnist_dense.png"),
    "classification/cnn.json": (classification.figure, "mnist_cnn.png"),
    "runtime.json": (runtime.figure, "mnist_runtime.png"),
}


def main() -> None:
    """Draw what has been measured."""
    for name, (figure, picture) in FIGURES.items():
        path = ROOT / "results" / name
        if path.exists():
            print(figure(results.read(path)["rows"], ROOT / "docs/figures" / picture))
        else:
            print(f"{name} has not been measured yet")


if __name__ == "__main__":
    main()
