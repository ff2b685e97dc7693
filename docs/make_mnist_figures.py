"""The figures of docs/mnist.md from results/: run `python docs/make_mnist_figures.py` from the repository root."""

from pathlib import Path

from bbalpha.experiments import classification, results, runtime

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("dense", "cnn")


def main() -> None:
    """Draw what has been measured."""
    for model in MODELS:
        path = ROOT / "results/classification" / f"{model}.json"
        draw(lambda path=path: results.read(path), classification.figure, f"mnist_{model}.png")
    draw(lambda: runtime.load(ROOT / "results/runtime"), runtime.figure, "mnist_runtime.png")


def draw(read, figure, name):
    """Print the path of a figure, or what is missing for it."""
    try:
        print(figure(read()["rows"], ROOT / "docs/figures" / name))
    except FileNotFoundError as error:
        print(f"{error.filename} has not been measured yet")


if __name__ == "__main__":
    main()
