"""A real server under load, and one row without any -> results/serve.json.

    python benchmarks/serve.py                    # about three minutes
    python benchmarks/serve.py --seconds 5 --out /tmp/serve.json

Three questions, each asked of servers in processes of their own, over real connections on this machine:

- 50 clients for a minute, each with one row and then the next: failures, percentiles of latency, throughput.
- Requests answered together, and each by a call of its own (`Limits(batch_requests=1)`): the ratio of throughputs. Two
  servers run side by side and take turns, a few seconds each, so that what else the machine does is the same for both.
- One row, one client: the latency beside that of the passes themselves, `estimator.predictive` of this row in this
  process, in turns too. The ratio of the medians is reported and the ratio of the minima beside.

The model is a table of cars, seven columns with text, dates and gaps, by `bbalpha fit` with the quick budget.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from bbalpha.experiments import results
from bbalpha.tabular.fitting import fit_table
from bbalpha.tabular.model import TableModel

_SERVER = """
import sys
from bbalpha.serve.limits import Limits
from bbalpha.serve.running import serve
serve([sys.argv[1]], port=0, limits=Limits(batch_requests=int(sys.argv[2])))
"""


@dataclass(frozen=True)
class Config:
    seconds: float = 60.0
    clients: int = 50
    turn: float = 3.0
    rounds: int = 300
    seed: int = 0


def run(config: Config, ledger: results.Ledger) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path, frame = str(Path(folder) / "cars"), cars()
        fit_table(frame, "Miles_per_Gallon", budget="quick", seed=config.seed).save(path)
        model = TableModel.load(path)
        rows = [
            json.loads(text)
            for text in frame[model.columns].to_json(orient="records", lines=True, date_format="iso").split("\n")
            if text
        ]
        bodies = [json.dumps({"rows": [row]}).encode() for row in rows]
        for measure in (one_row, against_single, under_load):
            start = time.perf_counter()
            found = measure(config, path, model, bodies)
            ledger.add(found, seconds=time.perf_counter() - start)
            for row in found:
                print(json.dumps(row))


def under_load(config: Config, path: str, model: TableModel, bodies: list[bytes]) -> list[results.Row]:
    """All clients at once for the whole time."""
    with server(path, requests=256) as port:
        asyncio.run(load(port, bodies, config.clients, 1.0))
        found = asyncio.run(load(port, bodies, config.clients, config.seconds))
    return [{"work": "load", "way": "together", "clients": config.clients, **summary(found, config.seconds)}]


def against_single(config: Config, path: str, model: TableModel, bodies: list[bytes]) -> list[results.Row]:
    """Two servers in turns."""
    ways = {"together": 256, "one request, one call": 1}
    found: dict[str, list[tuple[int, float]]] = {way: [] for way in ways}
    spent = dict.fromkeys(ways, 0.0)
    with ExitStack() as stack:
        ports = {way: stack.enter_context(server(path, requests=n)) for way, n in ways.items()}
        for port in ports.values():
            asyncio.run(load(port, bodies, config.clients, 1.0))
        for _ in range(max(1, round(config.seconds / 2 / config.turn))):
            for way, port in ports.items():
                start = time.perf_counter()
                found[way] += asyncio.run(load(port, bodies, config.clients, config.turn))
                spent[way] += time.perf_counter() - start
    rows = [{"work": "turns", "way": way, "clients": config.clients, **summary(found[way], spent[way])} for way in ways]
    base = rows[1]["requests_per_second"]
    return [row | {"ratio": row["requests_per_second"] / base} for row in rows]


def one_row(config: Config, path: str, model: TableModel, bodies: list[bytes]) -> list[results.Row]:
    """One client, nobody else; and the passes of the same row."""
    row = model.table(model.frame([json.loads(bodies[0])["rows"][0]]))
    times: dict[str, list[float]] = {"the passes": [], "a request": []}
    with server(path, requests=256) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        message = request(bodies[0])
        for i in range(config.rounds + 10):
            start = time.perf_counter()
            model.estimator.predictive(row)
            middle = time.perf_counter()
            connection.sendall(message)
            received(connection)
            if i >= 10:
                times["the passes"].append(middle - start)
                times["a request"].append(time.perf_counter() - middle)
    unit = times["the passes"]
    return [
        {
            "work": "one row", "way": way, "clients": 1, "ratio": statistics.median(t) / statistics.median(unit),
            "ratio_minimum": min(t) / min(unit), "ms_p50": 1e3 * statistics.median(t), "ms_minimum": 1e3 * min(t),
        }
        for way, t in times.items()
    ]  # fmt: skip


def summary(found: list[tuple[int, float]], seconds: float) -> results.Row:
    ms = sorted(1e3 * latency for _, latency in found)
    return {
        "requests": len(found), "failed": sum(status != 200 for status, _ in found),
        "requests_per_second": len(found) / seconds,
        **{f"ms_p{q}": ms[min(len(ms) - 1, len(ms) * q // 100)] for q in (50, 95, 99)}, "ms_worst": ms[-1],
    }  # fmt: skip


# ------------------------------------------------------------------------------ server and clients


@contextmanager
def server(path: str, *, requests: int) -> Iterator[int]:
    """The port of a server in a process of its own, which must end well."""
    process = subprocess.Popen([sys.executable, "-c", _SERVER, path, str(requests)], stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline().rsplit(":", 1)[1])
        process.send_signal(signal.SIGTERM)
        if process.wait(30):
            raise RuntimeError(f"The server must end with code 0; it ended with {process.returncode}.")
    finally:
        process.kill()


def request(body: bytes) -> bytes:
    head = (
        "POST /predict HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", "")).encode() + body


def received(connection: socket.socket) -> bytes:
    """One answer, whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(rest) < length:
        rest += connection.recv(65536)
    return rest


async def load(port: int, bodies: list[bytes], clients: int, seconds: float) -> list[tuple[int, float]]:
    """Status and latency of all requests of so many clients in so much time; a connection that breaks has status 0."""
    end, found = time.perf_counter() + seconds, []

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = number
        while time.perf_counter() < end:
            start = time.perf_counter()
            status = 0
            try:
                writer.write(request(bodies[turn % len(bodies)]))
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                answer = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                status = int(head.split()[1]) if b'"mean"' in answer else -1
            except (OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            found.append((status, time.perf_counter() - start))
            turn += clients
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    return found


def cars() -> Any:
    from vega_datasets import data

    frame = data.cars()
    return frame[frame["Miles_per_Gallon"].notna()].drop(columns="Name")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=Config.seconds)
    parser.add_argument("--clients", type=int, default=Config.clients)
    parser.add_argument("--out", type=Path, default=Path("results/serve.json"))
    args = parser.parse_args()
    config = Config(seconds=args.seconds, clients=args.clients)
    args.out.unlink(missing_ok=True)  # a load is measured whole
    command = f"python benchmarks/serve.py --seconds {args.seconds:g} --clients {args.clients}"
    run(config, results.Ledger(args.out, command=command, seed=config.seed, settings={"clients": args.clients}))


if __name__ == "__main__":
    main()
