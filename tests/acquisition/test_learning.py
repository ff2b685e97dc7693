"""Learning in rounds: killed loops go on to the same choices, no label is asked for twice, copies are left alone."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import bbalpha
from bbalpha._files import FolderInUseError, Lock
from bbalpha.acquisition import LabelFile, bald, batch_bald, learn, power_bald, random, top

SIZE, END = 5, 30


class KilledError(Exception):
    pass


@pytest.fixture(scope="module")
def clouds():
    """Three clouds in the plane, 150 rows, each row there twice with a little noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(75) % 3
    centres = torch.tensor([[0.0, 3.0], [3.0, 0.0], [-3.0, -3.0]])
    x = centres[y] + torch.randn(75, 2, generator=generator)
    return torch.cat((x, x + 1e-3 * torch.randn(75, 2, generator=generator))), y.repeat(2)


def train(x, y):
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    data, options = (x, y), {"epochs": 3, "n_passes": 4, "batch_size": 30, "learning_rate": 0.05, "progress": False}
    bbalpha.fit(net, data, objective=bbalpha.CrossEntropy(0.5), **options)
    return net


def asked(pool, labels, **options):
    given = {"fit": train, "n_labels": END, "start": 10, "size": SIZE, "n_passes": 20, "progress": False}
    return learn(pool, labels, **{**given, **options})


class Person:
    """Answers, remembers what it was asked, and dies when it has been asked often enough."""

    def __init__(self, y, dies_at=None):
        self.y, self.asked, self.dies_at = y, [], dies_at

    def __call__(self, rows):
        if self.dies_at is not None and len(self.asked) + len(rows) > self.dies_at:
            raise KilledError
        self.asked += rows
        return self.y[rows]


@pytest.fixture(scope="module")
def whole(clouds):
    return asked(*clouds)


def told(found):
    return [(r.n_labels, r.score) for r in found.rounds]


def test_a_function_a_file_and_an_array_give_the_same(clouds, whole, tmp_path):
    x, y = clouds
    path = tmp_path / "labels.csv"
    pd.DataFrame({"row": range(len(y)), "label": y.tolist()}).to_csv(path, index=False)
    ways = [lambda rows: y[rows], lambda rows: list(y.numpy()[rows]), path, str(path), y.numpy()]
    for labels in ways:
        found = asked(x, labels, state=tmp_path / f"{len(list(tmp_path.iterdir()))}")
        assert (found.rows, found.labels) == (whole.rows, whole.labels)
    assert whole.labels == y[whole.rows].tolist()


def test_no_row_is_asked_for_twice_and_rounds_are_counted(clouds, whole):
    person = Person(clouds[1])
    found = asked(clouds[0], person)
    assert len(set(person.asked)) == len(person.asked) == END
    assert found.rows == person.asked == whole.rows
    assert [r.n_labels for r in found.rounds] == list(range(10, END + 1, SIZE))


def test_all_rows_can_be_asked_for(clouds):
    x, y = clouds[0][:20], clouds[1][:20]
    assert sorted(asked(x, y, n_labels=20, size=7).rows) == list(range(20))


@pytest.mark.parametrize("dies_at", [9, 14, 22])
def test_a_loop_that_was_killed_while_asking_goes_on_to_the_same_choices(clouds, whole, tmp_path, dies_at):
    first, second = Person(clouds[1], dies_at), Person(clouds[1])
    with pytest.raises(KilledError):
        asked(clouds[0], first, state=tmp_path / "s")
    found = asked(clouds[0], second, state=tmp_path / "s")
    assert first.asked + second.asked == whole.rows
    assert (found.rows, told(found)) == (whole.rows, told(whole))


@pytest.mark.parametrize("dies_in", [1, 3])
def test_a_loop_that_was_killed_while_training_goes_on_to_the_same_choices(clouds, whole, tmp_path, dies_in):
    calls = []

    def dying(x, y):
        calls.append(len(x))
        if len(calls) == dies_in:
            raise KilledError
        return train(x, y)

    dying.__qualname__ = train.__qualname__
    first, second = Person(clouds[1]), Person(clouds[1])
    with pytest.raises(KilledError):
        asked(clouds[0], first, state=tmp_path / "s", fit=dying)
    assert asked(clouds[0], second, state=tmp_path / "s").rows == whole.rows
    assert first.asked + second.asked == whole.rows


def test_a_loop_goes_on_with_more_labels_and_a_finished_one_trains_nothing(clouds, whole, tmp_path):
    short = asked(*clouds, n_labels=20, state=tmp_path / "s")
    longer = asked(*clouds, state=tmp_path / "s")
    assert (short.rows, longer.rows) == (whole.rows[:20], whole.rows)
    assert told(longer) == told(whole)
    again = asked(clouds[0], None.__ne__, state=tmp_path / "s", fit=train)
    assert (again.rows, again.model) == (whole.rows, None)


def test_another_loop_is_refused(clouds, tmp_path):
    x, y = clouds
    asked(x, y, n_labels=10, state=tmp_path / "s")
    for other in ({"seed": 1}, {"size": 6}, {"n_passes": 21}, {"choose": power_bald}, {"start": 9}):
        with pytest.raises(ValueError, match=f"another `{next(iter(other))}`"):
            asked(x, y, **{"state": tmp_path / "s", "n_labels": 10, **other})
    with pytest.raises(ValueError, match="another `pool`"):
        asked(x + 1, y, n_labels=10, state=tmp_path / "s")
    bbalpha.fit(train(x, y), (x, y), objective=bbalpha.CrossEntropy(0.5), epochs=1, checkpoint=tmp_path / "other")
    with pytest.raises(ValueError, match="holds something else"):
        asked(x, y, state=tmp_path / "other")


def test_one_loop_at_a_time_has_the_folder(clouds, tmp_path):
    lock = Lock(tmp_path / "loop")
    assert lock.acquire()
    with pytest.raises(FolderInUseError, match="another loop"):
        asked(*clouds, state=tmp_path)
    lock.release()


def test_a_target_ends_it_and_scores_are_told(clouds):
    heard = []
    found = asked(*clouds, score=lambda _: 0.1 * (len(heard) + 1), target=0.25, callback=heard.append)
    assert [r.score for r in found.rounds] == pytest.approx([0.1, 0.2, 0.3])
    assert [r.n_labels for r in heard] == [10, 15, 20] == [r.n_labels for r in found.rounds]
    assert len(found.rows) == 20


def test_batch_bald_leaves_copies_alone_where_bald_takes_them(clouds):
    x, y = clouds
    weights = torch.randn(200, 2, 3, generator=torch.Generator().manual_seed(0))

    def sure(_, labels):  # functions that differ, each of them sure: the label of a copy tells nothing
        return lambda left: torch.softmax(50 * left @ weights, 2)

    def copies(choose):
        found = asked(x, y, fit=sure, choose=choose, start=range(10), n_labels=16, size=6)
        return 6 - len({row % 75 for row in found.rows[10:]})

    assert copies(lambda probs, size, seed: top(bald(probs), size)) >= 2
    assert copies(batch_bald) == 0


@pytest.mark.parametrize("choose", [power_bald, lambda probs, size, seed: random(probs.shape[1], size, seed=seed)])
def test_other_choices_fit_in(clouds, choose):
    assert len(set(asked(*clouds, choose=choose).rows)) == END


def test_models_of_other_kinds(clouds):
    x, y = clouds
    by_net = asked(x, y, n_labels=15)
    assert asked(x.numpy(), y, fit=lambda a, b: train(torch.tensor(a), b), n_labels=15).rows == by_net.rows

    def function(rows, labels):
        net = train(rows, labels)
        return lambda left: torch.softmax(bbalpha.sample(net.eval(), left, 20, masks="shared", seed=0), 2)

    class Estimator:
        def __init__(self, net):
            self.net = net

        def predict_passes(self, left):
            return bbalpha.sample(self.net.eval(), torch.tensor(left), 20, masks="shared").softmax(2).detach().numpy()

    assert len(asked(x, y, fit=function, n_labels=15).rows) == 15
    arrays = asked(x.numpy(), y.numpy(), fit=lambda a, b: Estimator(train(torch.tensor(a), b)), n_labels=15)
    assert arrays.rows[:10] == by_net.rows[:10]
    with pytest.raises(TypeError, match="`fit` must return"):
        asked(x, y, fit=lambda a, b: 3)


def test_the_callers_generator_is_left_alone(clouds):
    before = torch.get_rng_state()
    asked(*clouds, n_labels=15)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3)}, "one for each of the 150 rows"),
        ({"labels": lambda rows: [0]}, "one label for each of 10 rows; got 1"),
        ({"start": [1, 1]}, "each once, from 0 to 149"),
        ({"start": [150]}, "each once, from 0 to 149"),
        ({"n_labels": 151}, "n_labels"),
        ({"n_labels": 9}, "n_labels"),
        ({"n_passes": 1}, "n_passes"),
    ],
)
def test_wrong_arguments_get_one_sentence(clouds, change, message):
    with pytest.raises(ValueError, match=message):
        asked(clouds[0], change.get("labels", clouds[1]), **{k: v for k, v in change.items() if k != "labels"})


# ------------------------------------------------------------------------------ the file


def test_labels_are_on_the_disk_before_the_next_is_asked_for(tmp_path):
    path = tmp_path / "labels.csv"

    def ask(row):
        if row == 3:
            raise KeyboardInterrupt
        return f"a,{row}"

    with pytest.raises(KeyboardInterrupt):
        LabelFile(path, ask=ask)([5, 4, 3])
    assert pd.read_csv(path).to_dict("list") == {"row": [5, 4], "label": ["a,5", "a,4"]}
    again = LabelFile(path, ask=lambda row: 0)
    assert again.rows == [5, 4]
    assert again([3, 4, 3]) == [0, "a,4", 0]
    assert LabelFile(path).rows == [5, 4, 3]


def test_a_file_that_an_editor_left_without_its_last_line_end_is_gone_on_with(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("row,label\n1,7")
    assert LabelFile(path, ask=lambda row: 8)([1, 2]) == [7, 8]
    assert path.read_text() == "row,label\n1,7\n2,8\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "must begin with the line"),
        ("row,label\nx,1\n", "Line 2 of"),
        ("row,label\n1,\n", "Line 2 of"),
        ("row,label\n1,2\n1,3\n", "two labels for row 1"),
        ("row,label\n1,2\n", "lacks rows 0, 2"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, message):
    path = tmp_path / "labels.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        LabelFile(path)([0, 1, 2])


def test_labels_that_are_text_come_through(clouds):
    x, y = clouds
    names = np.array(["a", "b", "c"])
    seen = []

    def fit(rows, labels):
        seen.append(labels)
        return train(rows, torch.tensor([list(names).index(label) for label in labels]))

    found = asked(x, names[y], fit=fit, n_labels=15)
    assert found.labels == names[y[found.rows]].tolist()
    assert isinstance(seen[0], np.ndarray)
