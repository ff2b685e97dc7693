"""`create_app`: the service as a FastAPI application; every route calls one function of a model.

app = create_app(load_models(["cars"]))
"""

import json
import mimetypes
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import APIKeyHeader
from starlette.exceptions import HTTPException

from bbalpha.serve import messages
from bbalpha.serve.batching import Batcher, Work
from bbalpha.serve.gate import DRAIN_WAIT, AuditLog, Gate, Traffic, refusal
from bbalpha.serve.images import ImageModel
from bbalpha.serve.limits import WAIT, Limits, RefusedError
from bbalpha.serve.messages import AttackAsked, DensityAsked, MapAsked, PredictAsked
from bbalpha.serve.models import Answer, Served, ServedTable

_PAGE = Path(__file__).parent / "page"
_WHY = {
    400: "The body cannot be read.",
    401: "No key, or a wrong one.",
    404: "No such model, or no such page.",
    408: "The request took too long to arrive.",
    413: "The body is too large.",
    422: "What was asked cannot be answered.",
    429: "Too many requests wait, or too many bytes of them; Retry-After says for how long to wait.",
    500: "The service failed.",
    503: "The service is about to end, or has too many connections; Retry-After says when to try again.",
    504: "The answer took too long.",
}


class Service:
    """Models, each with its queue.

    Args:
        models: By name.
        limits: Of every request.
    """

    def __init__(self, models: Mapping[str, Served], limits: Limits) -> None:
        self.models, self.limits, self.traffic = dict(models), limits, Traffic()
        self.queues = {name: Batcher(name, limits, self.traffic.metrics) for name in models}

    def model(self, name: str | None) -> Served:
        """The model that is asked for."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise RefusedError(422, f"`model` must say which; there are {', '.join(self.models)}.")
        if name not in self.models:
            raise RefusedError(404, f"There is no model {name!r:.60}; there are {', '.join(self.models)}.")
        return self.models[name]

    async def ask(self, model: Served, key: tuple[Any, ...], rows: Sequence[Any], work: Work) -> list[Answer]:
        """The answers to rows that were read, finite each."""
        try:
            found = await self.queues[model.name].ask(key, rows, work)
        except ValueError as error:
            raise RefusedError(422, _sentence(str(error))) from error
        if None in found:
            where = found.index(None)
            raise RefusedError(422, f"Row {where} has no finite answer; are its numbers far from those at the fit?")
        return found

    def passes(self, model: Served, n_rows: int, n_passes: int | None, seed: int | None) -> tuple[int, int]:
        """How many passes of which seed, if that is within the limits."""
        n_passes = model.n_passes if n_passes is None else n_passes
        most = self.limits
        if n_rows > most.max_rows:
            raise RefusedError(422, f"`rows` must be at most {most.max_rows}; got {n_rows}. Send them in parts.")
        if n_passes > most.max_passes:
            raise RefusedError(422, f"`n_passes` must be at most {most.max_passes}; got {n_passes}.")
        if n_rows * n_passes > most.max_work:
            raise RefusedError(
                422, f"Rows times passes must be at most {most.max_work}; got {n_rows} times {n_passes}."
            )
        return n_passes, model.seed if seed is None else seed

    async def predict(self, asked: PredictAsked, request: Request) -> Answer:
        """Answers to rows, or to an image."""
        model = self.model(asked.model)
        wanted, other = ("image", "rows") if isinstance(model, ImageModel) else ("rows", "image")
        given = getattr(asked, wanted)
        if given is None or getattr(asked, other) is not None:
            raise RefusedError(422, f"The model {model.name!r} takes `{wanted}`, and nothing but it.")
        rows = _read(model, given if wanted == "rows" else [given])
        n_passes, seed = self.passes(model, len(rows), asked.n_passes, asked.seed)
        request.state.asked = {"model": model.name, "rows": len(rows), "n_passes": n_passes, "seed": seed}
        settings: dict[str, Any] = {"n_passes": n_passes, "seed": seed, "coverage": asked.coverage}
        found = await self.ask(model, ("predict", *settings.values()), rows, partial(model.answer, **settings))
        return {"model": model.name, **settings, "predictions": found}

    async def density(self, asked: DensityAsked, request: Request) -> Answer:
        """The predictive density of a row."""
        model = self._table(asked.model, "density")
        if model.task != "regression":
            raise RefusedError(422, f"A density is of a quantity; {model.name!r} tells classes: ask /predict.")
        rows = _read(model, [asked.row])
        n_passes, seed = self.passes(model, 1, asked.n_passes, asked.seed)
        request.state.asked = {"model": model.name, "rows": 1, "n_passes": n_passes, "seed": seed}
        work = partial(model.density, n_passes=n_passes, seed=seed, coverage=0.9)
        (found,) = await self.ask(model, ("density", n_passes, seed), rows, work)
        return {"model": model.name, "n_passes": n_passes, "seed": seed, **found}

    async def map(self, asked: MapAsked, request: Request) -> Answer:
        """Predictions and ignorance over two columns, the others as in a row."""
        model = self._table(asked.model, "map")
        try:
            across, up, rows = model.grid(asked.row, asked.across, asked.up, asked.size)
        except ValueError as error:
            raise RefusedError(422, _sentence(str(error))) from error
        n_passes, seed = model.n_passes, model.seed
        request.state.asked = {"model": model.name, "rows": len(rows), "n_passes": n_passes, "seed": seed}
        work = partial(model.answer, n_passes=n_passes, seed=seed, coverage=0.9)
        *found, here = await self.ask(model, ("predict", n_passes, seed, 0.9), rows, work)
        label = here.get("label")
        values = [one["mean"] if label is None else one["probs"][label] for one in found]
        ignorance = [one["epistemic_std" if label is None else "mutual_information"] for one in found]
        lines = range(0, len(found), asked.size)
        return {
            "model": model.name, "across": across, "up": up, "label": label,
            "prediction": [values[i : i + asked.size] for i in lines],
            "ignorance": [ignorance[i : i + asked.size] for i in lines],
        }  # fmt: skip

    async def attack(self, asked: AttackAsked, request: Request) -> Answer:
        """An image after an attack."""
        model = self.model(asked.model)
        if not isinstance(model, ImageModel):
            raise RefusedError(422, f"An attack is on an image; {model.name!r} takes rows.")
        rows = _read(model, [asked.image])
        request.state.asked = {"model": model.name, "rows": 1, "seed": model.seed}
        (image,) = await self.ask(model, ("attack", asked.step), rows, partial(model.attacked, step=asked.step))
        return {"model": model.name, "image": image}

    def _table(self, name: str | None, route: str) -> ServedTable:
        model = self.model(name)
        if not isinstance(model, ServedTable):
            raise RefusedError(422, f"/{route} is for models of tables; {model.name!r} takes images.")
        return model


def create_app(
    models: Mapping[str, Served],
    limits: Limits | None = None,
    api_key: str | None = None,
    audit: str | os.PathLike[str] | None = None,
) -> FastAPI:
    """The service of `models` as an application that any ASGI server runs.

    Args:
        models: By name, from `load_models`.
        limits: Of every request.
        api_key: Where given, the header X-API-Key must hold it, but for the page, /health and /ready.
        audit: A file that gets a line of JSON for every POST.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ValueError("`api_key` must be letters, digits and signs of ASCII, no space at its ends, and not empty.")
    odd = [name for name, model in models.items() if name != model.name]
    if odd or not models:
        raise ValueError(f"`models` must be models by their own names, from load_models; got {odd or 'none'}.")
    limits = Limits() if limits is None else limits
    service, log = Service(models, limits), None if audit is None else AuditLog(Path(audit))

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        for queue in service.queues.values():
            queue.close()
        if log is not None:
            log.close()

    app = FastAPI(
        title="bbalpha", version=version("bbalpha"), lifespan=life, docs_url=None, redoc_url=None,
        redirect_slashes=False,  # a redirection would lead to the host that the client names
        description="Predictions that say how sure they are, and why they are not.",
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},  # nobody else is told
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(Gate, traffic=service.traffic, limits=limits, api_key=api_key, audit=log)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _odd)
    app.add_exception_handler(Exception, _failed)
    # what is asked most comes first, and on the application itself: the way to a route costs more than the rest
    key: dict[str, Any] = {} if api_key is None else {"dependencies": [Security(APIKeyHeader(name="X-API-Key"))]}
    _add_questions(app, service, key)
    _add_facts(app, service, key)
    _add_page(app)
    return app


# ------------------------------------------------------------------------------ routes


def _add_questions(app: FastAPI, service: Service, key: Mapping[str, Any]) -> None:
    """What is asked of models."""
    why = _failures(400, *([401] if key else []), 404, 408, 413, 422, 429, 500, 503, 504)

    @app.post("/predict", response_model=messages.Predicted, responses=why, **key, **_example(service))
    async def predict(asked: PredictAsked, request: Request) -> Response:
        """Answers to rows or an image: how much or which, how sure, and whether it is unusual."""
        return _json(await service.predict(asked, request))

    @app.post("/density", response_model=messages.Density, responses=why, **key)
    async def density(asked: DensityAsked, request: Request) -> Response:
        """The predictive density of a quantity."""
        return _json(await service.density(asked, request))

    @app.post("/map", response_model=messages.Map, responses=why, **key)
    async def map_(asked: MapAsked, request: Request) -> Response:
        """Where the model is ignorant, over two columns of numbers."""
        return _json(await service.map(asked, request))

    @app.post("/attack", response_model=messages.Attacked, responses=why, **key)
    async def attack(asked: AttackAsked, request: Request) -> Response:
        """An image, moved by the fast gradient sign method away from the label that the model gives it."""
        return _json(await service.attack(asked, request))


def _add_facts(app: FastAPI, service: Service, key: Mapping[str, Any]) -> None:
    """What is known of models and of the service."""
    told = {"models": [model.facts() for model in service.models.values()]}
    why = _failures(401) if key else {}

    @app.get("/models", response_model=messages.Models, responses=why, **key)
    async def models() -> Response:
        """What is served: task, columns, scores on held-out rows."""
        return JSONResponse(told)

    @app.get("/metrics", response_class=PlainTextResponse, responses=why, **key)
    async def metrics() -> Response:
        """Counts for Prometheus."""
        gauges: dict[str, Any] = {"bbalpha_queue_length": {name: len(q) for name, q in service.queues.items()}}
        gauges |= {"bbalpha_under_way": service.traffic.under_way, "bbalpha_draining": service.traffic.draining}
        text = service.traffic.metrics.text(gauges)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/health", response_model=messages.Status)
    async def health() -> Response:
        """Whether the process lives."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", response_model=messages.Status, responses=_failures(503))
    async def ready() -> Response:
        """Whether another request would be taken."""
        if service.traffic.draining:
            raise RefusedError(503, "The service is about to end.", wait=DRAIN_WAIT)
        if any(queue.full for queue in service.queues.values()):
            raise RefusedError(503, "Too many requests wait.", wait=WAIT)
        return JSONResponse({"status": "ready"})


def _add_page(app: FastAPI) -> None:
    """The page and its parts: the files that were in its folder at the start, and no others."""
    files = {f.name: f.read_bytes() for f in sorted(_PAGE.iterdir()) if f.is_file()} if _PAGE.is_dir() else {}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return part("index.html")

    @app.get("/page/{file}", include_in_schema=False)
    async def part_of_page(file: str) -> Response:
        return part(file)

    def part(name: str) -> Response:
        if name not in files:
            raise RefusedError(404, f"There is no page {name!r:.60}.")
        return Response(files[name], media_type=mimetypes.guess_type(name)[0], headers={"Cache-Control": "no-cache"})


def _example(service: Service) -> dict[str, Any]:
    """A request that the first model answers, for OpenAPI."""
    model = next(iter(service.models.values()))
    rows = {"image": model.example()} if isinstance(model, ImageModel) else {"rows": [model.example()]}
    body = {"model": model.name, **rows, "n_passes": model.n_passes, "seed": model.seed}
    return {"openapi_extra": {"requestBody": {"content": {"application/json": {"example": body}}}}}


def _failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": messages.Failure, "description": _WHY[status]} for status in statuses}


def _json(answer: Answer) -> Response:
    return Response(json.dumps(answer, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _read(model: Served, rows: Sequence[Any]) -> list[Any]:
    try:
        return model.read(rows)
    except ValueError as error:
        raise RefusedError(422, _sentence(str(error))) from error


# ------------------------------------------------------------------------------ what goes wrong


async def _refused(request: Request, error: Exception) -> Response:
    return refusal(error) if isinstance(error, RefusedError) else await _failed(request, error)


async def _invalid(request: Request, error: Exception) -> Response:
    """One sentence out of the first thing that pydantic found."""
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    place = ".".join(str(part) for part in first.get("loc", ())[1:] if first.get("type") != "json_invalid")
    why = "It is no JSON" if first.get("type") == "json_invalid" else str(first.get("msg", "It is something else"))
    where = f"`{place:.60}` is wrong" if place else "The body must be the JSON that /openapi.json describes"
    return JSONResponse({"error": _sentence(f"{where}: {why[:1].lower()}{why[1:]}")}, 422)


async def _odd(request: Request, error: Exception) -> Response:
    """Of the framework: no such route, no such method, a body that cannot be read."""
    status, headers = getattr(error, "status_code", 500), getattr(error, "headers", None)
    return JSONResponse(
        {"error": _sentence(f"{getattr(error, 'detail', error)}: {request.method} {request.url.path:.60}")},
        status,
        headers,
    )


async def _failed(request: Request, error: Exception) -> Response:
    """Of ours; the server hangs up after it, so a client that would send its next request here must be told."""
    return JSONResponse({"error": "The service failed; its log says why."}, 500, {"Connection": "close"})


def _sentence(text: str) -> str:
    """On one line, with a stop, in letters that can be sent."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split()).rstrip(".") + "."
