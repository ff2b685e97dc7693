"""The tables of docs/scale.md, from results/scale.json and results/parquet.json."""

from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
MASKS = {"per_example": "a row by itself", "shared": "shared"}
DAY = 86_400


def parquet():
    """Many rows from Parquet: memory, speed, and what a kill costs."""
    content = results.read(ROOT / "results/parquet.json")
    lines = _head(
        "", "rows", "there at the kill", "lost", "doubled", "peak, MB", "rows a second of CPU", "by the clock"
    )
    for r in content["rows"]:
        cells = (
            r["way"], f"{r['rows']:,}", f"{r.get('rows_before_kill', 0):,}", r["lost"], r["doubled"],
            f"{r['peak_mb']:.0f}", f"{r['rows_per_cpu_second']:,.0f}", f"{r['rows_per_second']:,.0f}",
        )  # fmt: skip
        lines.append(_row(*cells))
    differ = sum(r["parts_that_differ"] for r in content["rows"])
    return "\n".join(lines) + (
        f"\n\nOf three parts of each that were predicted again by themselves, {differ} differ. Made by "
        f"`{content['command']}`; the machine was busy with other things."
    )


def costs():
    """The coefficients, and how far off they are where they were not fitted."""
    content = _read()
    names = ("base", "a million weights", "a billion operations", "a million units", "off", "at worst")
    lines = _head("", "masks", *names)
    for r in _of(content, "cost"):
        ms = (1e3 * r["base"], 1e9 * r["weight"], 1e12 * r["operation"], 1e9 * r["unit"])
        off = (f"{r['off_median']:.0%}", f"{r['off_worst']:.0%}")
        lines.append(_row(r["of"], MASKS[r["masks"]], *(f"{value:.2f}" for value in ms), *off))
    trained = [r for r in _of(content, "train") if r["masks"] == "per_example"]
    ratios = sorted(r["saved_bytes"] / r["memory_formula"] for r in trained)
    return "\n".join(lines) + (
        "\n\nIn ms of CPU, one thread. Fitted to K = 1 and 16, judged on K = 4 (median, worst). What backward keeps is "
        f"{ratios[0]:.1f} to {ratios[-1]:.1f} times the 4 K N U bytes of the formula. {_made(content)}"
    )


def ranks():
    """A training step on many GPUs: its seconds, and the share of them that is products."""
    content = _read()
    lines = _head("weights", "rows", "GPUs", "by rows", "by passes", "by both", "bytes a rank sends")
    rows = {(r["weights"], r["batch"], r["ranks"], r["split"]): r for r in _of(content, "gpus")}
    for weights, batch, n, split in rows:
        if split != "rows" or n == 1 or (batch == 256 and weights != 1e8):
            continue
        found = [rows[weights, batch, n, way] for way in ("rows", "passes", "both")]
        cells = [f"{1e3 * r['seconds']:,.1f} ms, {100 * r['efficiency']:.2g} %" for r in found]
        name = f"{weights:.0e}".replace("e+0", "e")
        lines.append(_row(name, f"{batch:,}", f"{n:,}", *cells, _bytes(found[2]["bytes"])))
    gpu = content["settings"]["gpu"]
    return "\n".join(lines) + (
        f"\n\nK = 10; beside it the share of the GPUs' products that is used. Assumed, not measured: "
        f"{gpu['flops'] / 1e12:.0f} TFLOP/s that products reach, "
        f"{gpu['bandwidth'] / 1e9:.0f} GB/s a GPU in a ring, {1e6 * gpu['latency']:.0f} microseconds a message, "
        f"nothing overlapped. {_made(content)}"
    )


def queue():
    """The simulated queue beside the real one."""
    content = _read()
    lines = _head("", "", "requests a second", "p50, ms", "p95, ms", "p99, ms", "in a batch")
    for r in _of(content, "queue"):
        cells = (f"{r['per_second']:.0f}", f"{r['ms_p50']:.0f}", *(_number(r.get(f"ms_p{q}")) for q in (95, 99)),
                 f"{r['mean_batch']:.1f}")  # fmt: skip
        lines.append(
            _row(
                f"the batcher, {r['clients']} client{'s' * (r['clients'] > 1)}",
                r["way"].replace("batcher", "measured"),
                *cells,
            )
        )
    for r in _of(content, "served"):
        cells = (
            f"{r['per_second']:.0f}",
            *(f"{r[f'ms_p{q}']:.0f}" for q in (50, 95, 99)),
            _number(r.get("mean_batch")),
        )
        lines.append(_row(f"the service, {r['way']}", r["source"], *cells))
    return "\n".join(lines) + (
        "\n\nThe batcher: work that sleeps for 20 ms and 1 ms a row. The service: 50 clients of [its page](serve.md); "
        "its two rates set the two numbers of the simulation, the latencies are compared. " + _made(content)
    )


def day():
    """1e9 predictions a day."""
    content = _read()
    lines = _head("as requests of one row", "requests a second each", "refused", "p50, ms", "p99, ms", "in a batch")
    for r in _of(content, "day"):
        if r["way"] == "requests":
            cells = (f"{r['per_second']:.0f}", r["refused"], f"{r['ms_p50']:.0f}", f"{r['ms_p99']:.0f}")
            lines.append(_row(f"{r['servers']} servers", *cells, f"{r['mean_batch']:.0f}"))
    lines += ["", *_head("in batches, K passes", "masks", "cores of this machine, all day")]
    for r in _of(content, "day"):
        if r["way"] == "batches":
            name = f"{r['width']}-{r['width']}-{r['width']}-10, K = {r['n_passes']}"
            lines.append(_row(name, MASKS[r["masks"]], f"{r['cores']:.2g}"))
    return "\n".join(lines) + f"\n\n1e9 a day are {1e9 / DAY:,.0f} a second, evenly. {_made(content)}"


def _read():
    return results.read(ROOT / "results/scale.json")


def _of(content, work):
    return [r for r in content["rows"] if r["work"] == work]


def _head(*names):
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def _number(value):
    return "" if value is None else f"{value:.0f}"


def _bytes(n):
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _made(content):
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}."
