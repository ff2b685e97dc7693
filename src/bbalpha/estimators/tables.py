"""Tables as they come, as numbers for a network: what a DataFrame, an array or a list of rows becomes.

    encoder = TableEncoder.fit(frame)
    x = encoder.transform(frame)      # (N, F) float64, nothing missing
    encoder.names                     # "age", "age is missing", "city=Paris", "city=rare", "day: month (sin)", ...

What a column is hangs on its dtype, never on a guess:

- Numbers stay as they are, codes of categories too: where 1, 2 and 3 are names, say so with `astype("category")`.
- Missing numbers become the median of the rows at fit; "... is missing" tells which, if some were missing there.
- Truth values are 0 and 1, spans of time are seconds.
- Categories, text and mixtures have a column of 0 and 1 for each of up to 50 common levels, and one for the rest.
  Levels are compared by their text: 1 and "1" are the same one.
- Dates, in UTC, are days since the first one, and month, weekday and time of day on a circle. Text that looks like a
  date is text: `pandas.to_datetime` makes dates of it.
- A column that says nothing, the same in every row or missing in all, is left out.

pandas is not needed for arrays, and never imported here.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bbalpha.estimators.cells import Array, Cells, infinite, read
from bbalpha.estimators.columns import Column, Numbers, content, fit_column, median, of_content


class TableEncoder:
    """Turns tables into numbers, in the way it learnt from one of them.

    Attributes:
        names: Of the F columns that come out.
        numeric: Which of them are plain numbers (F,).
        n_features_in: Columns that go in.
        feature_names_in: Their names, or None where the table had none.

    >>> encoder = TableEncoder.fit([[1.5, "a"], [2.5, "b"], [None, "a"], [4.0, "b"]])
    >>> encoder.names
    ('x0', 'x0 is missing', 'x1=b')
    >>> encoder.transform([[None, "b"]]), encoder.unseen([[1.0, "c"]])
    (array([[2.5, 1. , 1. ]]), array([1]))
    """

    def __init__(self, columns: tuple[Column, ...], *, named: bool) -> None:
        self.columns = columns
        self.names = _distinct([name for column in columns for name in column.names])
        self.numeric: Array = np.array([one for column in columns for one in column.numeric], dtype=bool)
        self.n_features_in = len(columns)
        self.feature_names_in: Array | None = np.array([c.name for c in columns], dtype=object) if named else None

    @classmethod
    def fit(cls, X: Any, weight: Array | None = None) -> Self:
        """The encoder for a table like `X`.

        Args:
            X: DataFrame, 2-D array or list of rows (N, columns).
            weight: One number a row; rows of weight 0 are left out, the others count alike (N,).

        Raises:
            ValueError: If a column cannot be used, or none says anything.
            TypeError: If a cell holds no single value, or `X` is no table.
        """
        table = _table(X)
        rows = np.arange(table.n_rows)
        if weight is not None:
            if np.shape(weight) != (table.n_rows,):
                raise ValueError(f"`weight` must have one number a row, ({table.n_rows},); got {np.shape(weight)}.")
            rows = np.flatnonzero(np.asarray(weight) > 0)
        if not len(rows):
            raise ValueError("`weight` must be above 0 for at least one row; got none.")
        encoder = cls(_fit_columns(table, rows), named=table.named)
        if not encoder.names:
            found = "1 sample" if len(rows) == 1 else f"{len(rows)} rows that are the same, or rare levels alone,"
            raise ValueError(f"`X` must have a column that says something; got {found} in all of its columns.")
        return encoder

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """The encoder that `content` was called of."""
        if not isinstance(told["named"], bool) or not told["columns"]:
            raise ValueError(f"A table must have columns, named or not; got {dict(told)!r}.")
        return cls(tuple(map(of_content, told["columns"])), named=told["named"])

    def content(self) -> dict[str, Any]:
        """All that it learnt, as plain values that JSON and a model folder can hold."""
        return {"named": self.feature_names_in is not None, "columns": [content(column) for column in self.columns]}

    def transform(self, X: Any) -> Array:
        """The table as numbers (N, F).

        Finite float32 arrays stay float32 where no missing number was met at fit; an array of floats of which every
        column is kept is returned itself, not a copy.

        Raises:
            ValueError: If `X` has other columns than at fit, or a column holds something else.
        """
        table = self._same_table(X)
        if table.block is not None and all(c.kind == "number" for c in self.columns):
            return self._transform_block(table.block, table)
        return np.concatenate([c.encode(table.read(i, c.kind)) for i, c in enumerate(self.columns)], axis=1)

    def unseen(self, X: Any) -> Array:
        """How many cells of a row are of a kind that no row had at fit (N,).

        These are levels never seen, missing cells in a column that had none, and values in one that had none.
        """
        table = self._same_table(X)
        if table.block is not None and all(c.kind == "number" for c in self.columns):
            full = np.array([not c.missing for c in self.columns])
            return np.asarray((np.isnan(table.block) & full).sum(axis=1))
        counts = np.zeros(table.n_rows, dtype=np.int64)
        for i, column in enumerate(self.columns):
            counts += column.unseen(table.read(i, column.kind))
        return counts

    def _same_table(self, X: Any) -> "_Table":
        """`X`, if it has the columns of the fit, in their order."""
        table = _table(X)
        if self.feature_names_in is not None and table.named and [*self.feature_names_in] != table.names:
            raise _other_names(self.feature_names_in.tolist(), table.names)
        if len(table.names) != self.n_features_in:
            raise ValueError(
                f"X has {len(table.names)} features, but {type(self).__name__} is expecting {self.n_features_in} "
                "features as input."
            )
        return table

    def _transform_block(self, block: Array, table: "_Table") -> Array:
        """All columns at once where all are numbers."""
        varies = np.array([isinstance(c, Numbers) and c.varies for c in self.columns])
        flagged = np.array([c.missing for c in self.columns])
        finite = np.isfinite(block)
        if finite.all() and not flagged.any():
            return block if varies.all() else block[:, varies]
        table.check_finite()
        own = np.array([len(c.names) for c in self.columns])
        first, last = np.cumsum(own) - own, np.cumsum(own) - 1  # the number, and whether it is missing
        centre = np.array([c.centre for c in self.columns if isinstance(c, Numbers)])
        x = np.empty((len(block), own.sum()))
        x[:, first[varies]] = np.where(finite, block, centre)[:, varies]
        x[:, last[flagged]] = ~finite[:, flagged]
        return x


def needs_encoding(X: Any) -> bool:
    """Whether `X` holds anything but numbers, or misses some: what scikit-learn's estimators refuse.

    >>> needs_encoding([[1.0, 2.0]]), needs_encoding([[1.0, None]]), needs_encoding([["a", 2.0]])
    (False, True, True)
    """
    if hasattr(X, "iloc") and hasattr(X, "columns"):
        plain = all(isinstance(dtype, np.dtype) and dtype.kind in "iufb" for dtype in X.dtypes)
        return not plain or bool(X.isna().to_numpy().any())
    if hasattr(X, "to_pandas") or isinstance(X, np.ma.MaskedArray):
        return True
    try:
        array = np.asarray(X)
    except ValueError:
        return False
    if array.ndim != 2:
        return False
    return array.dtype.kind in "OUSTMm" or (array.dtype.kind == "f" and bool(np.isnan(array).any()))


# ------------------------------------------------------------------------------ tables of any kind


@dataclass(frozen=True)
class _Table:
    """A table whose columns can be read one by one.

    Attributes:
        source: A DataFrame, or an array (N, columns).
        names: Of the columns.
        named: Whether the caller gave the names.
        block: The whole table as floats, where all of it is plain numbers.
    """

    source: Any
    names: list[str]
    named: bool
    block: Array | None

    @property
    def n_rows(self) -> int:
        return len(self.source)

    def read(self, i: int, wanted: str | None = None) -> Cells:
        """A column, of the kind that is wanted."""
        column = self.source.iloc[:, i] if hasattr(self.source, "iloc") else self.source[:, i]
        return read(column, self.names[i], wanted)

    def check_finite(self) -> None:
        """Refuse a block with infinite numbers."""
        if self.block is not None and np.isinf(self.block).any():
            row, column = np.argwhere(np.isinf(self.block))[0]
            raise infinite(self.names[column], int(row))


def _fit_columns(table: _Table, rows: Array) -> tuple[Column, ...]:
    block = table.block
    if block is None or not np.isfinite(block).all():
        return tuple(fit_column(table.read(i).take(rows)) for i in range(len(table.names)))
    block = block if len(rows) == len(block) else block[rows]
    varies, centres = (block.max(axis=0) > block.min(axis=0)).tolist(), median(block).tolist()
    return tuple(
        Numbers(name, "number", centre, varied, False)
        for name, centre, varied in zip(table.names, centres, varies, strict=True)
    )


def _table(X: Any) -> _Table:
    """`X` as a table, if it is one."""
    if hasattr(X, "tocsr"):
        raise TypeError("`X` must be a dense table; got a sparse matrix. Use `X.toarray()` if it fits in memory.")
    if not hasattr(X, "iloc") and hasattr(X, "to_pandas"):
        X = X.to_pandas()
    table = _of_frame(X) if hasattr(X, "iloc") and hasattr(X, "columns") else _of_array(X)
    shape = (table.n_rows, len(table.names))
    for count, what in zip(shape, ("sample", "feature"), strict=True):
        if not count:
            raise ValueError(
                f"`X` must have a row and a column at least; got 0 {what}(s) (shape={shape}) while a minimum of 1 is "
                "required."
            )
    return table


def _of_frame(X: Any) -> _Table:
    if getattr(X.columns, "nlevels", 1) > 1:
        raise ValueError(
            f"`X` must have one name a column; got names of {X.columns.nlevels} levels. Flatten them first: "
            'X.columns = ["_".join(map(str, name)) for name in X.columns].'
        )
    twice = [name for name, count in Counter(X.columns).items() if count > 1]
    if twice:
        raise ValueError(f"`X` must have columns of different names; got {twice[0]!r} more than once. Rename one.")
    texts = [isinstance(name, str) for name in X.columns]
    if any(texts) and not all(texts):
        raise TypeError(
            "Feature names are only supported if all input features have string names; got "
            f"{X.columns[texts.index(False)]!r}. Use X.columns = X.columns.astype(str)."
        )
    plain = all(isinstance(dtype, np.dtype) and dtype.kind in "iuf" for dtype in X.dtypes)
    block = _floats(X.to_numpy()) if plain and len(texts) else None
    return _Table(X, [str(name) for name in X.columns], bool(texts) and all(texts), block)


def _of_array(X: Any) -> _Table:
    array = _as_array(X)
    if array.ndim != 2 or array.dtype.kind == "V":
        got = f"array of {array.dtype}" if array.dtype.kind == "V" else f"{array.ndim}D array"
        kind = "" if array.ndim == 2 or isinstance(X, np.ndarray) else f" out of a {type(X).__name__}"
        raise ValueError(
            f"`X` must be a DataFrame, a 2-D array or a list of rows; got a {got}{kind}. Reshape your data: "
            "X.reshape(-1, 1) if it is one column, X.reshape(1, -1) if it is one row."
        )
    block = _floats(array) if array.dtype.kind in "iuf" else None
    return _Table(array, [f"x{i}" for i in range(array.shape[1])], False, block)


def _as_array(X: Any) -> Array:
    """An array of `X`; of Python objects where numpy would make text of numbers, or forget what is masked."""
    if isinstance(X, (str, bytes, os.PathLike, Mapping)) or X is None:
        raise TypeError(f"`X` must be a DataFrame, a 2-D array or a list of rows; got {type(X).__name__}.")
    if isinstance(X, np.ma.MaskedArray):
        array = np.array(X.data, dtype=object)
        array[np.ma.getmaskarray(X)] = None
        return array
    if hasattr(X, "__dataframe__"):
        raise TypeError(
            f"`X` must be a pandas DataFrame, a 2-D array or a list of rows; got {type(X).__module__}."
            f"{type(X).__name__}. Convert it to pandas first."
        )
    try:
        array = np.asarray(X)
        return np.array(X, dtype=object) if array.dtype.kind in "USO" and not hasattr(X, "dtype") else array
    except ValueError as error:
        raise ValueError(f"`X` must be a table with rows of one length; numpy says: {error}") from error


def _floats(array: Array) -> Array:
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


# ------------------------------------------------------------------------------ names


def _distinct(names: list[str]) -> tuple[str, ...]:
    """The names, with a number behind those that were there before.

    >>> _distinct(["a=rare", "a=rare"])
    ('a=rare', 'a=rare (2)')
    """
    taken: dict[str, None] = {}
    for name in names:
        told, count = name, 1
        while told in taken:
            count += 1
            told = f"{name} ({count})"
        taken[told] = None
    return tuple(taken)


def _other_names(fitted: list[str], given: list[str]) -> ValueError:
    """The error of scikit-learn, in its words."""
    message = "The feature names should match those that were passed during fit.\n"
    new, gone = sorted({*given} - {*fitted}), sorted({*fitted} - {*given})
    for told, names in (
        ("Feature names unseen at fit time", new),
        ("Feature names seen at fit time, yet now missing", gone),
    ):
        if names:
            shown = [f"- {name}\n" for name in names[:5]] + ["- ...\n"] * (len(names) > 5)
            message += f"{told}:\n{''.join(shown)}"
    if not new and not gone:
        message += "Feature names must be in the same order as they were in fit.\n"
    return ValueError(message)
