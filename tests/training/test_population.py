import numpy as np
import pytest
import torch

import bbalpha
from bbalpha.estimators import BBAlphaRegressor
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.training import cosine, fit
from bbalpha.training.bank import ACTIVATIONS, SplitNLL
from bbalpha.training.population import Member, fit_population


def table(n=150, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g) * torch.tensor([1.0, 10.0, 0.1]) + 5
    y = x[:, 0] + (x[:, 1] - 5).abs() / 10 + 0.2 * torch.randn(n, generator=g)
    return x, 7 * y - 3


def separate(x, y, member, sizes, epochs, likelihood="gaussian", activation="relu", **options):
    """The same network by `fit`, on rows standardised as the member has them."""
    rows = torch.as_tensor(member.train)
    x, y = x.double(), y.double()
    x = (x[rows] - x[rows].mean(0)) / x[rows].std(0, correction=0)
    torch.manual_seed(member.seed)
    made = ACTIVATIONS[activation]
    net = mlp(sizes, dropout=member.dropout, input_dropout=member.input_dropout, activation=made)
    if y.ndim == 2:
        y = (y[rows] - y[rows].mean(0)) / y[rows].std(0, correction=0)
        objective = GaussianNLL(member.alpha) if likelihood == "gaussian" else SplitNLL(member.alpha)
    else:
        y, objective = y[rows].long(), CrossEntropy(member.alpha)
    fit(
        net, (x, y), objective=objective, epochs=epochs, length_scale=member.length_scale,
        learning_rate=member.learning_rate, schedule=cosine, seed=member.seed, **options,
    )  # fmt: skip
    return net, objective


pytestmark = pytest.mark.filterwarnings("ignore:`alpha` is below 0")  # one of these is

MIXED = [
    Member(train=range(100), alpha=0.0, dropout=0.5, seed=3, length_scale=1.0),
    Member(train=range(20, 117), alpha=0.5, dropout=0.05, input_dropout=0.25, seed=4),  # another number of rows
    Member(train=range(40, 70), alpha=1.0, dropout=0.25, seed=3, learning_rate=0.003),  # fewer steps an epoch
    Member(train=range(0, 150, 2), alpha=-1.0, dropout=0.01, seed=5, length_scale=0.0),
]


@pytest.mark.parametrize(("hidden", "activation"), [((50,), "relu"), ((20, 10), "relu"), ((20, 10), "silu")])
@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "categorical"])
def test_a_member_is_the_network_of_a_separate_fit(hidden, activation, likelihood):
    x, y = table()
    y = torch.stack([y, y**2], 1) if likelihood != "categorical" else (y > y.mean()).long() + (y > y.mean() + 5).long()
    population = fit_population(
        x, y, MIXED, epochs=6, hidden_layer_sizes=hidden, batch_size=32, n_passes=5, likelihood=likelihood,
        activation=activation,
    )  # fmt: skip
    for i, member in enumerate(MIXED):  # 6 to 24 steps
        outputs = {"gaussian": 2, "heteroscedastic": 4, "categorical": 3}[likelihood]
        net, objective = separate(
            x, y, member, [3, *hidden, outputs], 6, likelihood, activation, batch_size=32, n_passes=5
        )
        for p, q in zip(population.network(i).parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
        if likelihood == "gaussian":
            torch.testing.assert_close(population.log_precision[i], objective.log_precision, rtol=1e-5, atol=1e-5)


def test_one_output_takes_its_own_product():
    x, y = table()
    member = Member(train=range(64), seed=1)
    population = fit_population(x, y, [member, member], epochs=10, batch_size=32)
    net, _ = separate(x, y[:, None], member, [3, 50, 1], 10, batch_size=32)
    for i in (0, 1):
        for p, q in zip(population.network(i).parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_trained_to_the_end_a_member_is_as_good_as_a_separate_fit(likelihood):
    x, y = table(400)
    x, y = x.numpy(), y.numpy()
    train, test = slice(0, 200), slice(200, 400)
    noise = "constant" if likelihood == "gaussian" else likelihood
    settings = {"dropout": 0.05, "input_dropout": 0.0, "validation_fraction": 0, "epochs": 40, "batch_size": 32}
    model = BBAlphaRegressor(hidden_layer_sizes=(50,), noise=noise, random_state=0, **settings)
    theirs = -model.fit(x[train], y[train]).log_prob(x[test], y[test])
    members = [Member(train=range(200), alpha=a, seed=model.seed_) for a in (0.0, 0.5)]
    population = fit_population(x, y, members, epochs=40, batch_size=32, likelihood=likelihood)
    ours = -population.log_likelihood(x, y, [range(200, 400)] * 2, n_passes=100)[1]
    assert theirs.mean() < 3.4  # of the mean and deviation of y alone: 3.6
    assert abs(ours.mean().item() - theirs.mean()) < theirs.std() / 200**0.5


def test_a_predicted_precision_finds_the_noise():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, generator=g)
    y = 5 + torch.where(x[:, 0] > 0.5, 2.0, 0.1) * torch.randn(400, generator=g)
    members = [Member(train=range(300), dropout=0.01)]
    constant, predicted = (
        fit_population(x, y, members, epochs=30, batch_size=30, likelihood=likelihood)
        .log_likelihood(x, y, [range(300, 400)])[0]
        .mean()
        for likelihood in ("gaussian", "heteroscedastic")
    )
    assert predicted > constant + 0.3


def test_weights_are_those_of_fit():
    x, y = table()
    weight = torch.rand(150)
    weight[::7] = 0
    population = fit_population(x, y, [Member(train=range(90), seed=2)], epochs=4, sample_weight=weight, batch_size=32)
    rows = torch.arange(90)
    share = (weight[rows] / weight[rows].sum()).double()[:, None]

    def scaled(t):
        mean = (t * share).sum(0)
        return (t - mean) / ((t - mean).square() * share).sum(0).sqrt()

    torch.manual_seed(2)
    net = mlp([3, 50, 1], dropout=0.05, input_dropout=0.0)
    fit(
        net, (scaled(x[rows].double()), scaled(y[rows].double()[:, None]), weight[rows]), objective=GaussianNLL(),
        epochs=4, batch_size=32, length_scale=1.0, learning_rate=0.01, schedule=cosine, seed=2,
    )  # fmt: skip
    for p, q in zip(population.network(0).parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_members_do_not_see_each_other():
    x, y = table()
    alone = fit_population(x, y, MIXED[:1], epochs=3, batch_size=32)
    together = fit_population(x, y, MIXED, epochs=3, batch_size=32)
    for p, q in zip(alone.network(0).parameters(), together.network(0).parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_log_likelihood_is_that_of_the_prediction_in_units_of_y():
    x, y = table()
    population = fit_population(x, y, MIXED, epochs=20, batch_size=32)
    test = [torch.arange(120, 150), torch.arange(117, 150), torch.arange(0, 30), torch.tensor([1, 3])]
    ours = population.log_likelihood(x, y, test, n_passes=2000)
    for i, rows in enumerate(test):
        inputs = ((x[rows] - population.x_mean[i]) / population.x_scale[i]).float()
        precision = float(population.log_precision[i].exp())
        p = bbalpha.predict_regression(population.network(i), inputs, n_passes=2000, precision=precision)
        p = p.rescaled(float(population.y_scale[i]), float(population.y_mean[i]))
        theirs = p.log_prob(y[rows][:, None])
        assert (ours[i] - theirs).abs().mean() < 0.1 * theirs.abs().mean()


def test_each_member_stops_by_its_own_rows():
    x, y = table()
    noise = torch.randn(150, generator=torch.Generator().manual_seed(1))
    target = torch.where(torch.arange(150) < 75, y, noise)
    members = [
        Member(train=range(60), validation=range(60, 75), seed=0),
        Member(train=range(75, 95), validation=range(95, 150), seed=0, length_scale=0.01),  # nothing to be learnt
        Member(train=range(60), seed=0),
    ]
    population = fit_population(x, target, members, epochs=60, patience=8, batch_size=16, schedule=None)
    learnt, overfitted, plain = population.best_epoch.tolist()
    assert overfitted < learnt
    assert plain == 60
    curve = population.nll[:, 1]
    assert int(curve.isfinite().sum()) == overfitted + 8
    again = population.log_likelihood(x, target, [range(1), range(95, 150), range(1)], n_passes=20)[1]
    assert -again.mean().item() == pytest.approx(curve[overfitted - 1].item(), abs=1e-4)  # the best weights are kept
    early = fit_population(x, target, members[1:2], epochs=overfitted, batch_size=16, schedule=None)
    torch.testing.assert_close(early.network(0)[0].weight, population.network(1)[0].weight, rtol=1e-4, atol=1e-5)


NAN = float("nan")
WRONG = {"epochs": (0, -5, NAN, 2**70), "hidden_layer_sizes": ((0,), NAN), "n_passes": (0, None), "patience": (0, -1),
         "batch_size": (0, -1), "n_validation_passes": (0,)}  # fmt: skip
WRONG_MEMBER = {"alpha": (NAN,), "dropout": (1.0, NAN, None), "input_dropout": (-0.1,), "length_scale": (-1, NAN),
                "learning_rate": (0, -1, NAN), "seed": (0.5, None, 2**64), "train": ([0.5], [-1], [150], [[0]], [True]),
                "validation": ([-1], [150])}  # fmt: skip


def test_what_is_wrong_is_named():
    x, y = table()
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^`{name}` must"):
                fit_population(x, y, MIXED, **{"epochs": 1, name: value})
    for name, values in WRONG_MEMBER.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^`{name}` must"):
                fit_population(x, y, [*MIXED, Member(**{"train": range(9), name: value})], epochs=1)
    with pytest.raises(TypeError, match="must be of Member; got dict"):
        fit_population(x, y, [{"train": range(9)}], epochs=1)
    population = fit_population(x, y, MIXED[:1], epochs=1)
    with pytest.raises(ValueError, match=r"^`n_passes` must"):
        population.log_likelihood(x, y, [range(3)], n_passes=0)
    with pytest.raises(ValueError, match=r"^`rows` must hold rows from 0 to 149; got -1 to 2"):
        population.log_likelihood(x, y, [[-1, 2]])


def test_tables_that_are_no_good_are_refused():
    x, y = table()
    for place in ((x, "x"), (y, "y")):
        bad = place[0].clone()
        bad[120] = NAN
        given = (bad, y) if place[1] == "x" else (x, bad)
        with pytest.raises(ValueError, match=f"^`{place[1]}` must be finite in the rows of every member"):
            fit_population(*given, [Member(train=range(9)), Member(train=range(100, 150))], epochs=1)
        fit_population(*given, [Member(train=range(100))], epochs=1)  # what nobody is given may be anything
    for weight in (-torch.ones(150), torch.full((150,), NAN), torch.ones(3)):
        with pytest.raises(ValueError, match=r"^`sample_weight` must"):
            fit_population(x, y, MIXED, epochs=1, sample_weight=weight)
    for labels in (y, -torch.ones(150), torch.ones(150, 1)):
        with pytest.raises(ValueError, match=r"^`y` must hold class indices"):
            fit_population(x, labels, MIXED, epochs=1, likelihood="categorical")


def test_numbers_of_numpy_are_numbers():
    x, y = table()
    member = Member(train=range(60), dropout=0.25, seed=3)
    same = Member(train=np.arange(60), dropout=np.float32(0.25), seed=np.int64(3), alpha=np.float64(0.5))
    a = fit_population(x, y, [member], epochs=2, hidden_layer_sizes=(4,), batch_size=16)
    b = fit_population(x, y, [same], epochs=np.int64(2), hidden_layer_sizes=np.int64(4), batch_size=np.int32(16))
    assert torch.equal(a.weights[0][0], b.weights[0][0])


def test_a_member_that_never_had_a_finite_likelihood_shows_it():
    x, y = table()
    members = [Member(train=range(60), validation=range(60, 90), learning_rate=rate) for rate in (1e30, 0.01)]
    population = fit_population(x, y, members, epochs=2)
    assert not population.nll[:, 0].isfinite().any()
    assert not population.weights[0][0][0].isfinite().all()  # not the network that it started from
    assert population.weights[0][0][1].isfinite().all()


def test_held_out_rows_without_weight_choose_no_epoch():
    x, y = table()
    weight = (torch.arange(150) < 60).float()
    members = [Member(train=range(60), validation=range(60, 90)), Member(train=range(60))]
    population = fit_population(x, y, members, epochs=4, sample_weight=weight, patience=1)
    assert population.best_epoch.tolist() == [4, 4]
    torch.testing.assert_close(population.log_precision[0], population.log_precision[1])


def test_errors():
    x, y = table()
    with pytest.raises(ValueError, match="at least one Member"):
        fit_population(x, y, [], epochs=1)
    with pytest.raises(ValueError, match="one of gaussian, heteroscedastic, student, categorical; got 'poisson'"):
        fit_population(x, y, MIXED, epochs=1, likelihood="poisson")
    with pytest.raises(ValueError, match="at least one training row"):
        fit_population(x, y, [Member(train=[0, 1])], epochs=1, sample_weight=torch.tensor([0.0, 0.0, *[1.0] * 148]))
    with pytest.raises(ValueError, match=r"\(N, F\)"):
        fit_population(x, y[:3], MIXED, epochs=1)


def test_numbers_that_are_left_as_they_are() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0, correction=0)
    y = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std(correction=0)
    member = Member(train=range(40), validation=range(40, 60))
    scaled, plain = (fit_population(x, y, [member], epochs=3, standardise=choice) for choice in (True, False))
    torch.testing.assert_close(scaled.nll, plain.nll)  # they had mean 0 and deviation 1
    wide = fit_population(3 * x + 1, 2 * y, [member], epochs=3, standardise=False)
    assert wide.x_mean.abs().max() == wide.y_mean.abs().max() == 0
    assert wide.x_scale.unique().tolist() == wide.y_scale.unique().tolist() == [1.0]
    assert (wide.nll - plain.nll).abs().min() > 0.1
    with pytest.raises(ValueError, match="`y` must be finite"):
        fit_population(x, y.masked_fill(y == y.max(), torch.nan), [member], epochs=1, standardise=False)
