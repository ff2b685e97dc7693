"""The table of docs/serve.md, from results/serve.json."""

from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent


def load():
    """Requests under load, together and one by one, and one row beside its passes."""
    content = results.read(ROOT / "results/serve.json")
    rows = {(r["work"], r["way"]): r for r in content["rows"]}
    lines = ["| | requests a second | failed | p50, ms | p95, ms | p99, ms |", "|---|---|---|---|---|---|"]
    names = {
        ("load", "together"): "{clients} clients for {seconds:.0f} s",
        ("turns", "together"): "in turns: answered together",
        ("turns", "one request, one call"): "in turns: one request, one call",
    }
    for key, name in names.items():
        r = rows[key]
        words = name.format(clients=r["clients"], seconds=r["requests"] / r["requests_per_second"])
        cells = [f"{r['requests_per_second']:.0f}", str(r["failed"]), *(f"{r[f'ms_p{q}']:.0f}" for q in (50, 95, 99))]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    ratio = rows["turns", "together"]["ratio"]
    single = next(r for (work, way), r in rows.items() if work == "one row" and r["ratio"] != 1)
    return "\n".join(lines) + (
        f"\n\nTogether it is {ratio:.1f} times as many. One row of one client takes {single['ms_p50']:.1f} ms, "
        f"{single['ratio']:.2f} times as long as its passes alone (by the fastest of each: "
        f"{single['ratio_minimum']:.2f}). Made by `{content['command']}` with torch {content['versions']['torch']}; "
        "clients and server share two cores."
    )
