"""skorch's nets on K passes: losses and predictions are bbalpha's, the rest is skorch's and scikit-learn's."""

import copy
import pickle

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.callbacks import EpochScoring
from torch import nn

import bbalpha
from bbalpha.conformal import conformal_sets
from bbalpha.integrations.skorch import AlphaNetClassifier, AlphaNetRegressor


class Module(nn.Module):
    def __init__(self, outputs=3, rate=0.1, pair=False):
        super().__init__()
        self.first, self.last, self.rate, self.pair = nn.Linear(4, 16), nn.Linear(16, outputs), rate, pair

    def forward(self, x):
        out = self.last(nn.functional.dropout(torch.relu(self.first(x)), self.rate, self.training))
        return out.chunk(2, -1) if self.pair else out


def table(n=60):
    X = torch.randn(n, 4).numpy()
    return X, (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)


def classifier(**options):
    options = {"max_epochs": 2, "lr": 0.1, "verbose": 0, "train_split": None} | options
    return AlphaNetClassifier(options.pop("module", Module), **options)


def regressor(**options):
    options = {"max_epochs": 2, "lr": 0.05, "verbose": 0, "train_split": None, "module__outputs": 1} | options
    return AlphaNetRegressor(Module, **options)


def first_losses(net, X, y):
    """Losses of the first epoch, and the weights before it."""
    net.initialize()
    before = copy.deepcopy(net.module_)
    torch.manual_seed(5)
    net.partial_fit(X, y)
    return net.history[0], before


# ------------------------------------------------------------------------------ training


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_loss_is_bbalphas_of_the_same_passes(alpha):
    X, y = table()
    told, before = first_losses(classifier(criterion__alpha=alpha, n_passes=7, max_epochs=1), X, y)
    torch.manual_seed(5)
    _draw_of_the_loader()
    outputs = bbalpha.sample(before.train(), torch.tensor(X), 7)
    expected = bbalpha.cross_entropy(outputs, torch.tensor(y), alpha=alpha)
    assert told["train_loss"] == pytest.approx(expected.item(), rel=1e-6)
    if alpha == 0:
        mean = np.mean([nn.functional.cross_entropy(f, torch.tensor(y)).item() for f in outputs])
        assert told["train_loss"] == pytest.approx(mean, rel=1e-5)


def _draw_of_the_loader():
    iter(torch.utils.data.DataLoader([0])).__next__()


def test_the_prior_is_added_with_the_rates_and_rows_of_the_training():
    X, y = table()
    kept = {}
    for length_scale in (None, 3.0):
        torch.manual_seed(0)
        net = classifier(length_scale=length_scale, module__rate=0.5, max_epochs=1)
        kept[length_scale], before = first_losses(net, X, y)
    keep = bbalpha.audit(before, torch.tensor(X)).keep
    assert keep["last.weight"] == 0.5
    kl = bbalpha.prior_kl(before, length_scale=3.0, n_data=60, keep=keep)
    assert kept[3.0]["train_loss"] - kept[None]["train_loss"] == pytest.approx(kl.item(), rel=1e-4)


def test_a_learned_precision_is_trained():
    X, _ = table(100)
    net = regressor(max_epochs=60).fit(X, X[:, :1])
    assert net.criterion_.precision > 1.5
    assert net.history[-1]["train_loss"] < net.history[0]["train_loss"]


def test_valid_loss_is_minus_the_predictive_log_likelihood_and_valid_acc_that_of_the_passes():
    X, y = table(40)
    net = AlphaNetClassifier(Module, max_epochs=1, verbose=0, batch_size=128).fit(X, y)
    held = net.get_split_datasets(X, y)[1]
    x, target = (torch.as_tensor(np.stack(part)) for part in zip(*held, strict=True))
    probs = bbalpha.sample(net.module_.eval(), x, 20, seed=net.seed_).softmax(-1).mean(0).detach()
    row = torch.arange(len(x))
    assert net.history[0]["valid_loss"] == pytest.approx(-probs[row, target].log().mean().item(), rel=1e-5)
    assert net.history[0]["valid_acc"] == pytest.approx((probs.argmax(1) == target).float().mean().item())


def test_callbacks_that_score_see_predictions_in_training_too():
    X, y = table()

    def disagreement(net, X, y):
        return net.predict_mutual_information(X).mean()

    scores = [EpochScoring("accuracy", on_train=True, name="train_acc"), EpochScoring(disagreement, name="mi")]
    net = AlphaNetClassifier(Module, max_epochs=1, verbose=0, callbacks=scores).fit(X, y)
    assert 0 <= net.history[0]["train_acc"] <= 1
    assert net.history[0]["mi"] > 0


# ------------------------------------------------------------------------------ prediction


@pytest.mark.parametrize("batch_size", [7, 128])
def test_predictions_are_those_of_predict_classification(batch_size):
    X, y = table()
    net = classifier(batch_size=batch_size).fit(X, y)
    p = bbalpha.predict_classification(net.module_, torch.tensor(X), masks="shared", seed=net.seed_)
    np.testing.assert_allclose(net.predict_proba(X), p.probs, atol=1e-6)
    np.testing.assert_array_equal(net.predict(X), p.label)
    np.testing.assert_allclose(net.predict_entropy(X), p.entropy, atol=1e-5)
    np.testing.assert_allclose(net.predict_mutual_information(X), p.mutual_information, atol=1e-5)
    np.testing.assert_allclose(net.log_prob(X, y), p.log_prob(torch.tensor(y)), atol=1e-5)
    np.testing.assert_allclose(net.predict_proba(X[:1]), net.predict_proba(X)[:1], atol=1e-6)


@pytest.mark.parametrize("source", ["learned", 4.0, "predicted"])
def test_predictions_are_those_of_predict_regression(source):
    X, _ = table()
    y, pair = X[:, :1], source == "predicted"
    net = regressor(criterion__precision=source, module__pair=pair, module__outputs=1 + pair, batch_size=7).fit(X, y)
    precision = source if pair else net.criterion_.precision
    p = bbalpha.predict_regression(net.module_, torch.tensor(X), precision=precision, masks="shared", seed=net.seed_)
    mean, std = net.predict(X, return_std=True)
    np.testing.assert_allclose(mean, p.mean, atol=1e-5)
    np.testing.assert_allclose(std, p.std, atol=1e-5)
    np.testing.assert_allclose(net.log_prob(X, y), p.log_prob(torch.tensor(y)), atol=1e-4)
    np.testing.assert_array_equal(net.predict(X), mean)


def test_any_loss_goes_and_knows_no_noise():
    X, _ = table()
    loss = nn.SmoothL1Loss(reduction="none")
    net = regressor(criterion=bbalpha.AlphaLoss, criterion__loss=loss, criterion__alpha=0.5).fit(X, X[:, :1])
    p = net.predictive(X)
    assert torch.equal(p.std, p.epistemic_std)
    with pytest.raises(ValueError, match="needs the precision"):
        net.log_prob(X, X[:, :1])


def test_a_dict_is_the_arguments_of_the_module():
    X, y = table()
    torch.manual_seed(1)
    one = classifier().fit(X, y)
    torch.manual_seed(1)
    other = classifier().fit({"x": X}, y)
    np.testing.assert_array_equal(one.predict_proba(X), other.predict_proba({"x": X}))


def test_a_pickled_net_predicts_the_same():
    X, y = table()
    net = classifier().fit(X, y)
    back = pickle.loads(pickle.dumps(net))
    np.testing.assert_array_equal(net.predict_proba(X), back.predict_proba(X))


# ------------------------------------------------------------------------------ scikit-learn


def test_alpha_and_passes_are_searched_by_likelihood():
    X, y = table(90)
    grid = {"criterion__alpha": [0.0, 1.0], "n_passes": [1, 4]}
    search = GridSearchCV(classifier(), grid, scoring="neg_log_loss", cv=2, error_score="raise").fit(X, y)
    best = search.best_estimator_
    assert best.criterion_.alpha == search.best_params_["criterion__alpha"]
    assert best.n_passes == search.best_params_["n_passes"]
    scores = search.cv_results_["mean_test_score"].reshape(2, 2)
    assert scores[0, 1] != scores[1, 1]  # alpha is heard
    assert scores[0, 0] != scores[0, 1]  # so are passes
    assert conformal_sets(search, X, y).coverage == 0.9


def test_held_out_density_of_a_regression_in_a_pipeline():
    X, _ = table()
    pipeline = make_pipeline(StandardScaler(), regressor())
    score = lambda model, X, y: model[-1].log_prob(model[0].transform(X), y).mean()  # noqa: E731
    search = GridSearchCV(pipeline, {"alphanetregressor__criterion__alpha": [0.0, 1.0]}, scoring=score, cv=2)
    search.fit(X, X[:, :1])
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


# ------------------------------------------------------------------------------ what is refused


def test_a_module_without_dropout_is_refused():
    with pytest.raises(ValueError, match="add_dropout"):
        classifier(module__rate=0.0).fit(*table())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"n_passes": 0}, "`n_passes` must be a whole number of at least 1; got 0"),
        ({"n_predict_passes": 1}, "`n_predict_passes` must be a whole number of at least 2; got 1"),
        ({"length_scale": -1.0}, "`length_scale` must be a finite number of at least 0; got -1.0"),
        ({"predict_nonlinearity": None}, '`predict_nonlinearity` must be left at "auto"; got None'),
        (
            {"criterion": nn.CrossEntropyLoss},
            "`criterion` must be bbalpha.CrossEntropy or bbalpha.AlphaLoss; got Cross",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(options, told):
    with pytest.raises((ValueError, TypeError), match=told):
        classifier(**options).fit(*table())


def test_calls_that_cannot_be_are_refused():
    X, y = table()
    with pytest.raises(TypeError, match=r"got extra\. Make X a dict"):
        classifier().fit(X, y, extra=1)
    net = regressor().fit(X, X[:, :1])
    with pytest.raises(ValueError, match="`training` must be False"):
        net.forward(X, training=True)
    net.trim_for_prediction()
    with pytest.raises(ValueError, match="went with `trim_for_prediction`"):
        net.predict(X)
