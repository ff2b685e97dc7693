"""A digit network in a browser: frozen to 20 passes, exported, and run where the page is; no row leaves the machine.

npm install --prefix examples/browser                   # onnxruntime-web, of which three files are copied
python examples/browser/build.py --out site             # trains (twenty seconds), freezes, exports
python -m http.server --directory site                  # any server of files will do
"""

import argparse
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

import torch

import bbalpha
from bbalpha import freezing
from bbalpha.experiments.digits import train_digits

HERE = Path(__file__).resolve().parent
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
PARTS = ("style.css", "draw.js", "strokes.js")  # of the page of `bbalpha serve`


def build(out: Path, *, n_passes: int = 20, epochs: int = 40, modules: Path = HERE / "node_modules") -> torch.nn.Module:
    """Put the page with all it needs into the folder `out`; the network that was frozen for it."""
    runtime = modules / "onnxruntime-web" / "dist"
    if not runtime.is_dir():
        raise SystemExit(f"`{runtime}` does not exist: npm install --prefix {HERE}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        train_digits(f"{folder}/digits", epochs=epochs, progress=False)
        net = bbalpha.load(f"{folder}/digits")
    frozen = bbalpha.freeze(net, n_passes, seed=0)
    freezing.export_onnx(frozen, out / "digits.onnx", torch.rand(1, 64), summary=freezing.ClassificationSummary())
    for name in RUNTIME:
        shutil.copy(runtime / name, out / name)
    for name in ("index.html", "page.js"):
        shutil.copy(HERE / name, out / name)
    for name in PARTS:
        (out / name).write_bytes((files("bbalpha.serve") / "page" / name).read_bytes())
    return net


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("site"))
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    build(args.out, epochs=args.epochs)
    size = sum(p.stat().st_size for p in args.out.iterdir()) / 1e6
    print(f"{args.out}: {size:.1f} MB, of it the network {(args.out / 'digits.onnx').stat().st_size / 1e6:.2f} MB")
