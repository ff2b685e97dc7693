"""More of the zoo: models in which it is not plain to see what a row is, each with what is known of its rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.overrides import TorchFunctionMode

from architectures import ByHand, Folded, Rows


@dataclass(frozen=True)
class Part:
    """Some of the rows stand on axis 0, as many as the data want."""


@dataclass(frozen=True)
class Case:
    """A model and its input.

    Attributes:
        name: Its name.
        make: Gives the model and its input.
        rows: N, as many as must come out.
        sites: Where the rows are in what its dropouts are given, in the order they are met, again and again; None
            where other calls draw, whose shared draws nobody has laid down.
        options: For `sample` and `predict_*`.
        out_axis: Of the rows in the output.
        interacts: Rows look at each other in evaluation mode too.
        whole: The input cannot be cut into rows.
        may_refuse: Shared masks may end in an error that says why not.
        alike: The same input with its first row in the place of all.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    rows: int
    sites: Sequence[Rows | Part] | None
    options: dict[str, Any] = field(default_factory=dict)
    out_axis: int = 0
    interacts: bool = False
    whole: bool = False
    may_refuse: bool = False
    alike: Callable[[Any], Any] | None = None

    def passes(self, model: nn.Module, x: Any, seed: int, n_passes: int, shared: bool) -> Tensor:
        """The passes one after the other, drawn by what is known of the rows (K, ...)."""
        flags = [(m, m.training) for m in model.modules()]
        try:
            model.train()
            return torch.stack([self._one(model, x, seed, k, shared, n_passes) for k in range(n_passes)])
        finally:
            for m, training in flags:
                m.training = training

    def _one(self, model: nn.Module, x: Any, seed: int, k: int, shared: bool, K: int) -> Tensor:
        with torch.no_grad(), Told(seed, k, self.rows, shared, self.sites or (), K):
            return call(model, x)


CASES: list[Case] = []


def case(rows: int, sites: Sequence[Rows | Part] | None = (0,), **known: Any) -> Callable[[Any], Any]:
    def add(make: Callable[[], tuple[nn.Module, Any]]) -> Any:
        CASES.append(Case(make.__name__, make, rows, sites, **known))
        return make

    return add


def call(model: nn.Module, x: Any) -> Any:
    """A tuple is several arguments, a mapping named ones, everything else (a packed sequence too) one."""
    if isinstance(x, tuple) and not isinstance(x, PackedSequence):
        return model(*x)
    return model(**x) if isinstance(x, dict) else model(x)


class Told(ByHand, TorchFunctionMode):
    """Serves the draws of one pass, told where the rows of each dropout are."""

    def __init__(self, seed: int, k: int, n: int, shared: bool, sites: Sequence[Rows | Part], K: int) -> None:
        ByHand.__init__(self, seed, k, n, shared, K)
        TorchFunctionMode.__init__(self)
        self.sites = cycle(sites)

    def where(self, shape: list[int], rows: Any) -> Any:
        if isinstance(rows, Part):
            return ([1, *shape[1:]] if self.shared else shape), lambda v: v
        return super().where(shape, rows)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            x, p, training = (*args, *kwargs.values())[:3]
            return self.keep(x, p, next(self.sites)) if training and p > 0 and x.numel() else x
        if func in (torch.randperm, torch.multinomial, torch.poisson):
            return func(*args, generator=self.passes.generators[0], **kwargs)
        if func is torch.rand:
            return torch.empty(*args).uniform_(generator=self.passes.generators[0])
        return func(*args, **kwargs)


def same_rows(x: Tensor, axis: int = 0) -> Tensor:
    return x.narrow(axis, 0, 1).expand_as(x).clone()


# ------------------------------------------------------------------------------ graphs


NODES = 9


class Graph(nn.Module):
    """Two rounds of messages along the edges."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 6), nn.Linear(6, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self._spread(self.a(x), edge_index)))
        return self._spread(self.b(h), edge_index)

    @staticmethod
    def _spread(h: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        return h + torch.zeros_like(h).index_add(0, target, h[source])


def ring(nodes: int = NODES) -> Tensor:
    """Every node gives to the next and to the last but one (2, 2 nodes)."""
    here = torch.arange(nodes)
    return torch.stack((torch.cat((here, here)), torch.cat(((here + 1) % nodes, (here - 2) % nodes))))


@case(NODES, interacts=True, whole=True)
def graph_in_a_tuple():
    return Graph(), (torch.randn(NODES, 4), ring())


@case(NODES, interacts=True, whole=True)
def graph_with_its_edges_first():
    return Graph(), {"edge_index": ring(), "x": torch.randn(NODES, 4)}


@case(NODES, interacts=True, whole=True)
def graph_with_as_many_edges_as_nodes():
    return Graph(), (torch.randn(NODES, 4), ring()[:, :NODES])


class Data:
    """What holds tensors and is none of torch's; goes through its parts by name, as graphs of libraries do."""

    def __init__(self, x: Tensor, edge_index: Tensor) -> None:
        self.x, self.edge_index = x, edge_index

    def keys(self) -> list[str]:
        return ["x", "edge_index"]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(vars(self).items())


@case(NODES, interacts=True, whole=True, may_refuse=True)
def graph_in_an_object():
    class Net(Graph):
        def forward(self, data):
            return super().forward(data.x, data.edge_index)

    return Net(), Data(torch.randn(NODES, 4), ring())


# ------------------------------------------------------------------------------ rows that look at each other


class Peers(nn.Module):
    """Rows attend to each other; what they say is dropped, or the weights (N, N) are."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.a, self.b, self.weights, self.drop = nn.Linear(4, 4), nn.Linear(4, 3), weights, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        weights = (h @ h.T).softmax(-1)
        return self.b(h + (self.drop(weights) @ h if self.weights else weights @ self.drop(h)))


@case(5, interacts=True)
def in_batch_attention():
    return Peers(weights=False), torch.randn(5, 4)


@case(5, [(0, 1)], interacts=True, may_refuse=True)
def in_batch_attention_with_dropped_weights():
    return Peers(weights=True), torch.randn(5, 4)


@case(5, interacts=True)
def batch_centred():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.5)

        def forward(self, x):
            h = self.drop(torch.tanh(self.a(x)))
            return self.b(h - h.mean(0))

    return Net(), torch.randn(5, 4)


@case(5, interacts=True, may_refuse=True)
def mixup_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.5)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            if self.training:
                lam = torch.rand(1)
                h = lam * h + (1 - lam) * h[torch.randperm(len(h))]
            return self.b(self.drop(h))

    return Net(), torch.randn(5, 4)


# ------------------------------------------------------------------------------ sequences


class Classifier(nn.Module):
    """An LSTM whose last state is classified: (T, N, F) or a packed sequence -> (N, C)."""

    def __init__(self, classes: int, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, layers, dropout=0.3 if layers > 1 else 0.0)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, classes)

    def forward(self, x: Any) -> Tensor:
        return self.head(self.drop(self.lstm(x)[1][0][-1]))


TIME_FIRST = {"options": {"batch_dim": 1}, "alike": lambda x: same_rows(x, 1)}


@case(5, **TIME_FIRST)
def time_first_lstm():
    return Classifier(3), torch.randn(7, 5, 4)


@case(5, **TIME_FIRST)
def time_first_lstm_with_as_many_classes_as_rows():
    return Classifier(5), torch.randn(7, 5, 4)


@case(5, **TIME_FIRST)
def time_first_lstm_with_as_many_steps_and_classes_as_rows():
    return Classifier(5), torch.randn(5, 5, 4)


def packed() -> PackedSequence:
    return pack_sequence([torch.randn(t, 4) for t in (5, 2, 4, 4)], enforce_sorted=False)


@case(4, whole=True, may_refuse=True)
def packed_sequence():
    return Classifier(3), packed()


@case(4, None, whole=True, may_refuse=True)
def packed_sequence_with_dropout_between_layers():
    return Classifier(3, layers=2), packed()


@case(4)
def generated_step_by_step():
    class Net(nn.Module):
        """Calls itself for every token, on all that is there by then."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.3)

        def step(self, x):  # (N, t, 4) -> (N, 1, 4)
            return self.b(self.drop(torch.tanh(self.a(x)))).mean(1, keepdim=True)

        def generate(self, x):
            for _ in range(4):
                x = torch.cat((x, self.step(x).softmax(-1)), 1)
            return x

        def forward(self, x):
            return self.generate(x)[:, 1:]

    return Net(), torch.randn(4, 1, 4)


# ------------------------------------------------------------------------------ inputs beside the rows


def first_alike(x: Any) -> Any:
    return (same_rows(x[0]), *x[1:])


@case(4, [0, None], alike=first_alike)
def prototypes_beside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(4, 6), nn.Dropout(0.5)

        def forward(self, x, prototypes):  # (N, 4), (C, 6)
            return self.drop(torch.tanh(self.a(x))) @ self.drop(prototypes).T

    return Net(), (torch.randn(4, 4), torch.randn(4, 6))


@case(4, alike=first_alike)
def attention_mask_beside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

        def forward(self, x, mask):  # (N, T, 6), (T, T)
            h = self.a(x)
            return self.drop((h @ h.mT + mask).softmax(-1)) @ h

    return Net(), (torch.randn(4, 4, 6), torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -1e9))


class Nested(nn.Module):
    """a (N, 4), b a pair of (N, 2) and (N, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.drop = nn.Linear(9, 8), nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, a: Tensor, b: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(self.drop(torch.tanh(self.layer(torch.cat((a, *b), -1)))))


def parts() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(5, 4), torch.randn(5, 2), torch.randn(5, 3)


@case(5, alike=lambda x: {"a": same_rows(x["a"]), "b": tuple(map(same_rows, x["b"]))})
def nested_arguments():
    a, *b = parts()
    return Nested(), {"a": a, "b": tuple(b)}


@case(5, alike=lambda x: ({"a": same_rows(x[0]["a"]), "b": tuple(map(same_rows, x[0]["b"]))},))
def nested_in_one_argument():
    class Net(Nested):
        def forward(self, batch):
            return super().forward(**batch)

    a, *b = parts()
    return Net(), ({"a": a, "b": tuple(b)},)


@case(5, alike=lambda x: ([same_rows(t) for t in x[0]],))
def list_in_one_argument():
    class Net(Nested):
        def forward(self, batch):
            return super().forward(batch[0], batch[1:])

    return Net(), (list(parts()),)


# ------------------------------------------------------------------------------ draws that belong to no row


@case(8, [None], alike=same_rows)
def dropconnect_by_hand():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.b(torch.tanh(F.linear(x, F.dropout(self.a.weight, 0.3, self.training), self.a.bias)))

    return Net(), torch.randn(8, 4)


@case(64, [None], alike=same_rows)
def noise_on_twice_as_many_units_as_rows():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 128), nn.Linear(128, 1)
            self.scale = nn.Parameter(torch.ones(128))

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)) * F.dropout(self.scale, 0.5, self.training))

    return Net(), torch.randn(64, 4)


# ------------------------------------------------------------------------------ draws of other kinds


@case(6, [Part()], may_refuse=True, alike=same_rows)
def mixture_of_experts():
    class Net(nn.Module):
        """Each row goes to one expert, and to no other."""

        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
            self.drop, self.aux_loss = nn.Dropout(0.5), torch.zeros(())

        def forward(self, x):
            gates = self.gate(x).softmax(-1)
            self.aux_loss = gates.mean(0).square().sum()
            out = x.new_zeros(len(x), 3)
            for e, expert in enumerate(self.experts):
                chosen = (gates.argmax(-1) == e).nonzero()[:, 0]
                out = out.index_add(0, chosen, expert(self.drop(x[chosen])) * gates[chosen, e, None])
            return out

    return Net(), torch.randn(6, 4)


class Counted(nn.Module):
    """Numbers drawn from what the net says."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(4, 6), nn.Linear(6, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).softmax(-1)
        return self.b(self.draw(h) if self.training else h)


@case(5, None, may_refuse=True, alike=same_rows)
def multinomial_draws():
    return Counted(lambda h: F.one_hot(torch.multinomial(h, 1)[:, 0], 6).float()), torch.randn(5, 4)


@case(5, None, may_refuse=True, alike=same_rows)
def poisson_draws():
    return Counted(lambda h: torch.poisson(3 * h)), torch.randn(5, 4)


# ------------------------------------------------------------------------------ rows on other axes inside


@case(6, [1], alike=same_rows)
def transposed_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):  # (N, T), as long as it is wide
            return self.b(F.dropout(torch.tanh(self.a(x)).T, 0.5, self.training).T)

    return Net(), torch.randn(6, 6)


class Heads(nn.Module):
    """Attention with its heads folded into the batch: (N heads, T, T), or (heads N, T, T)."""

    def __init__(self, rows_major: bool) -> None:
        super().__init__()
        self.rows_major, self.a, self.drop = rows_major, nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).unflatten(-1, (4, 2)).transpose(1, 2)  # (N, heads, T, 2)
        h = h if self.rows_major else h.transpose(0, 1)
        flat = h.flatten(0, 1)
        out = (self.drop((flat @ flat.mT).softmax(-1)) @ flat).view_as(h)
        return (out if self.rows_major else out.transpose(0, 1)).transpose(1, 2).flatten(2)


@case(4, [Folded(4)], alike=same_rows)
def heads_folded_behind_rows():
    return Heads(rows_major=True), torch.randn(4, 3, 8)


@case(4, [Folded(4, rows_major=False)], alike=same_rows)
def heads_folded_before_rows():
    return Heads(rows_major=False), torch.randn(4, 3, 8)
