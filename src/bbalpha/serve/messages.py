"""What is sent and what comes back, as OpenAPI tells it: requests are checked by these, answers are described."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

MOST_SIZE, MOST_SEED, MOST_LINES, MOST_NAMES = 32, 2**31 - 1, 10_000, 100
_CELL = {"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "boolean"}, {"type": "null"}]}
_ROW: dict[str, Any] = {"type": "object", "additionalProperties": _CELL}

# cells are checked by the model, which knows its columns
Row = Annotated[dict[str, Any], WithJsonSchema(_ROW)]
Rows = Annotated[
    list[dict[str, Any]], Field(min_length=1), WithJsonSchema({"type": "array", "items": _ROW, "minItems": 1})
]
Image = Annotated[list[list[float]], Field(min_length=1, max_length=MOST_LINES)]
Name = Annotated[str | None, Field(description="Which model; may be left out if there is one.")]
Passes = Annotated[int | None, Field(ge=2, description="K; the model's own if left out.")]
Seed = Annotated[int | None, Field(ge=0, le=MOST_SEED, description="Of the passes; the model's own if left out.")]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: Name = None

    @model_validator(mode="before")
    @classmethod
    def _few_names(cls, body: Any) -> Any:
        """One error for names without end: pydantic would write one for each, and nobody else is answered meanwhile."""
        if isinstance(body, dict) and len(body) > MOST_NAMES:
            raise ValueError(f"it must have at most {MOST_NAMES} names, and has {len(body)}")
        return body


class PredictAsked(_Asked):
    """Rows for a model of tables, or an image for a model of images."""

    rows: Rows | None = None
    image: Image | None = None
    n_passes: Passes = None
    seed: Seed = None
    coverage: Annotated[float, Field(ge=0.01, le=0.999, description="Of the interval from low to high.")] = 0.9


class DensityAsked(_Asked):
    """A row for a model of quantities."""

    row: Row
    n_passes: Passes = None
    seed: Seed = None


class MapAsked(_Asked):
    """A row, and two columns of numbers that are varied around it."""

    row: Row
    across: str
    up: str
    size: Annotated[int, Field(ge=2, le=MOST_SIZE, description="Points a side.")] = 24


class AttackAsked(_Asked):
    """An image, and how far each of its points may move."""

    image: Image
    step: Annotated[float, Field(ge=0, le=1)] = 0.1


class Quantity(BaseModel):
    """What is said of a quantity."""

    mean: float
    std: float
    epistemic_std: float
    aleatoric_std: float
    low: float
    high: float
    unusual: bool


class Classes(BaseModel):
    """What is said of classes."""

    label: str
    probs: dict[str, float]
    entropy: float
    mutual_information: float
    unusual: bool
    votes: dict[str, int] | None = None


class Predicted(BaseModel):
    """Answers, one a row; `n_passes`, `seed` and `coverage` sent back give the same ones."""

    model: str
    n_passes: int
    seed: int
    coverage: float
    predictions: list[Quantity | Classes]


class Density(Quantity):
    """The predictive density of one row along a line, and the means of the passes."""

    model: str
    n_passes: int
    seed: int
    x: list[float]
    density: list[float]
    means: list[float]


class Map(BaseModel):
    """Predictions, and what more data would settle, by line from below; of classes the probability of `label`."""

    model: str
    across: list[float]
    up: list[float]
    label: str | None
    prediction: list[list[float]]
    ignorance: list[list[float]]


class Attacked(BaseModel):
    """The image after the attack."""

    model: str
    image: list[list[float]]


class About(BaseModel):
    """What is known of a model."""

    name: str
    task: Literal["regression", "classification", "image"]
    target: str
    classes: list[str]
    fields: list[dict[str, Any]]
    scores: dict[str, float | None]
    guess: dict[str, float | None]
    threshold: float | None
    n_passes: int
    seed: int
    image: dict[str, Any] | None


class Models(BaseModel):
    """What is served."""

    models: list[About]


class Status(BaseModel):
    """How the service is."""

    status: str


class Failure(BaseModel):
    """Why there is no answer, in one sentence."""

    error: str
