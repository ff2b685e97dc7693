"""A good call of every public function: {name: (function, {argument: good value})}, from which one argument goes bad.

What is left out, and why: types, constants and results that only we make (predictions, histories, selections) are not
called by users; the frameworks (keras, jax, ...) have arguments of theirs and tests of their own.
"""

from functools import partial

import torch
from torch import nn
from torch.distributions import Normal

import bbalpha
from bbalpha import (
    acquisition,
    attacks,
    calibration,
    checkpoint,
    conformal,
    data,
    detection,
    divergences,
    estimators,
    freezing,
    joint,
    layers,
    metrics,
    networks,
    objectives,
    plots,
    prediction,
    predictive,
    priors,
    report,
    testing,
    training,
)
from bbalpha.tabular.fitting import fit_table


def net(n_out=3):
    """A small network whose rows have four numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, n_out)).eval()


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def goods(folder):
    """{name: (function, arguments)}; what is written goes to `folder`."""
    return {
        **_objectives(),
        **_passes(folder),
        **_numbers(),
        **_layers(),
        **_results(),
        **_tables(folder),
        **_others(folder),
    }


def _objectives():
    logits, labels = numbers(5, 6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    mean, y, each = numbers(5, 6, 2), numbers(6, 2), nn.CrossEntropyLoss(reduction="none")
    return {
        "alpha_loss": (objectives.alpha_loss, {"losses": mean[..., 0].abs(), "alpha": 0.5}),
        "cross_entropy": (objectives.cross_entropy, {"outputs": logits, "target": labels}),
        "binary_cross_entropy": (objectives.binary_cross_entropy, {"outputs": mean, "target": y.gt(0).float()}),
        "gaussian_nll": (objectives.gaussian_nll, {"outputs": mean, "target": y, "precision": 1.0}),
        "AlphaLoss": (objectives.AlphaLoss, {"loss": each}),
        "CrossEntropy": (objectives.CrossEntropy, {}),
        "GaussianNLL": (objectives.GaussianNLL, {}),
        "CrossEntropy()": (objectives.CrossEntropy(), {"outputs": logits, "target": labels}),
        "GaussianNLL()": (objectives.GaussianNLL(), {"outputs": mean, "target": y}),
        "AlphaLoss()": (objectives.AlphaLoss(each), {"outputs": logits, "target": labels}),
        "prior_kl": (priors.prior_kl, {"model": net(), "length_scale": 1.0, "n_data": 10}),
        "param_groups": (priors.param_groups, {"model": net(), "length_scale": 1.0, "n_data": 10}),
        "weight_decay": (priors.weight_decay, {"length_scale": 1.0, "keep": 0.5, "n_data": 10}),
        "keep_probabilities": (priors.keep_probabilities, {"model": net()}),
        "has_quadratic_kl": (priors.has_quadratic_kl, {"model": net()}),
    }  # fmt: skip


def _passes(folder):
    x, labels = numbers(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    rows = (numbers(12, 4), torch.arange(12) % 3)
    rest = {"objective": objectives.CrossEntropy(), "epochs": 1, "n_passes": 2, "progress": False, "seed": 0}

    clean = numbers(30, 4)
    detector = detection.Detector(net(), n_passes=3, seed=0).fit(clean)
    return {
        "sample": (bbalpha.sample, {"model": net(), "x": x, "n_passes": 2}),
        "audit": (bbalpha.audit, {"model": net(), "x": x}),
        "stochastic": (_entered, {"model": net()}),
        "add_dropout": (bbalpha.add_dropout, {"model": nn.Sequential(nn.Linear(4, 3)), "p": 0.5}),
        "remove_dropout": (bbalpha.remove_dropout, {"model": net()}),
        "predict_classification": (bbalpha.predict_classification, {"model": net(), "x": x, "n_passes": 3}),
        "predict_regression": (bbalpha.predict_regression, {"model": net(), "x": x, "n_passes": 3}),
        "freeze": (freezing.freeze, {"model": net(), "n_passes": 2, "seed": 0}),
        "freeze recorded": (freezing.freeze, {"model": net(), "n_passes": 2, "seed": 0, "x": x}),
        "fgsm": (attacks.fgsm, {"model": net(), "x": x.sigmoid(), "step": 0.1, "n_passes": 2}),
        "iterative_fgsm": (attacks.iterative_fgsm, {
            "model": net(), "x": x.sigmoid(), "target": 1, "n_steps": 1, "n_passes": 2}),
        "Predictive": (attacks.Predictive, {"model": net()}),
        "Detector": (detection.Detector, {"model": net(), "n_passes": 3}),
        "Detector.fit": (detection.Detector(net(), n_passes=3).fit, {"x_clean": clean}),
        "Detector.flag": (detector.flag, {"x": x}),
        "Detector.scores": (detector.scores, {"x": x}),
        "Detector.report": (detector.report, {"x_clean": x, "x_other": x}),
        "Detector.load": (detection.Detector.load, {"folder": folder / "nowhere", "model": net()}),
        "conformal_threshold": (detection.conformal_threshold, {"scores": torch.rand(50), "false_alarm": 0.1}),
        "fit_temperature": (calibration.fit_temperature, {"model": net(), "x": x, "target": labels, "n_passes": 3}),
        "fit_precision": (calibration.fit_precision, {"model": net(1), "x": x, "target": numbers(6, 1), "n_passes": 3}),
        "TemperedClassifier": (calibration.TemperedClassifier, {"model": _classifier(), "temperature": 1.5}),
        "Functions": (joint.Functions, {"model": net(), "n_passes": 3}),
        "Functions()": (joint.Functions(net(), 3, 0), {"x": x}),
        "Functions.probs": (joint.Functions(net(), 3, 0).probs, {"x": x}),
        "assert_samples": (testing.assert_samples, {"model": net(), "x": x}),
        "fit": (training.fit, {"model": net(), "data": rows, **rest}),
        "retrofit": (training.retrofit, {
            "model": nn.Sequential(nn.Linear(4, 3)), "held_out": (numbers(40, 4), torch.arange(40) % 3),
            "objective": objectives.CrossEntropy(), "rates": (0.1,), "n_passes": 2, "epochs": 1, "seed": 0}),
        "fit_population": (training.fit_population, {
            "x": numbers(12, 4), "y": numbers(12, 1), "members": [training.Member(range(12))], "epochs": 1,
            "hidden_layer_sizes": (4,), "n_passes": 2}),
        "Member": (_trained_member, {
            "train": range(12), "alpha": 0.5, "dropout": 0.1, "input_dropout": 0.1, "length_scale": 1.0,
            "learning_rate": 0.01, "seed": 0, "spread": 1.0, "validation": None, "columns": None}),
        "classification_of": (prediction.classification_of, {"outputs": numbers(5, 6, 3)}),
    }  # fmt: skip


def _trained_member(
    train, alpha, dropout, input_dropout, length_scale, learning_rate, seed, spread, validation, columns
):
    member = training.Member(
        train, validation, alpha, dropout, input_dropout, length_scale, learning_rate, seed, spread, columns
    )
    return training.fit_population(
        numbers(12, 4), numbers(12, 1), [member], epochs=1, hidden_layer_sizes=(4,), n_passes=2
    )


def _entered(model):
    with bbalpha.stochastic(model):
        pass


def _numbers():
    probs, log_probs = numbers(6, 3).softmax(1), numbers(5, 6, 3).log_softmax(2)
    labels, groups = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 0, 1, 1, 2, 2])
    scores, positive = torch.linspace(0, 1, 6), torch.tensor([False, True, False, True, True, False])
    means, y, all_probs = numbers(5, 6), numbers(6), log_probs.exp()
    p, q = Normal(0.0, 1.0), Normal(1.0, 1.0)
    prior, line = Normal(torch.zeros(1), 1.0), divergences.LinearGaussian(torch.ones(2, 1), torch.zeros(2))
    one = {"probs": all_probs}
    pick = {"probs": all_probs, "size": 2}
    scored = {"scores": scores, "positive": positive}
    energy = {"q": prior, "p0": prior, "factors": line}
    rows = torch.tensor([[0, 1], [2, 3]])
    found = {
        "metrics": {
            "nll": {"log_likelihood": log_probs[..., 0]},
            "rmse": {"mean": y, "target": y}, "joint_kl": {"true": y, "predicted": y},
            "accuracy": {"probs": probs, "target": labels}, "brier": {"probs": probs, "target": labels},
            "ece": {"probs": probs, "target": labels}, "reliability": {"probs": probs, "target": labels},
            "crps": {"outputs": means, "target": y, "precision": 1.0}, "auroc": scored, "aupr": scored, "fpr95": scored,
            "interval_coverage": {"low": y, "high": y + 1, "target": y}, "interval_width": {"low": y, "high": y + 1},
            "risk_coverage": {"uncertainty": scores, "loss": scores},
            "joint_nll": {"log_likelihood": log_probs[..., 0], "groups": groups},
            "joint_log_likelihood": {"log_probs": log_probs, "y": torch.tensor([[0, 1], [2, 0]]), "rows": rows},
            "clustered_log_likelihood": {"log_probs": log_probs, "y": torch.tensor([[0, 1], [2, 0]]), "rows": rows},
            "dyadic_rows": {"n_rows": 20, "n_groups": 5, "size": 4},
        },
        "acquisition": {
            "bald": one, "entropy": one, "mean_std": one, "variation_ratio": one,
            "epig": one | {"target_probs": all_probs},
            "batch_bald": pick, "power_bald": pick, "softmax_bald": pick, "random": {"n_rows": 9, "size": 2},
            "top": {"scores": scores, "size": 2}, "k_center": {"features": numbers(6, 2), "size": 2},
            "thompson": {"outputs": means, "size": 2}, "expected_improvement": {"outputs": means, "best": 0.1},
            "information_gain": {"outputs": means, "precision": 1.0},
            "batch_information_gain": {"outputs": means, "size": 2, "precision": 1.0},
        },
        "divergences": {
            "amari": {"p": p, "q": q, "alpha": 0.5}, "renyi": {"p": p, "q": q, "alpha": 0.5}, "kl": {"p": p, "q": q},
            "hellinger": {"p": p, "q": q}, "amari_from_renyi": {"value": torch.tensor(0.2), "alpha": 0.5},
            "renyi_from_amari": {"value": torch.tensor(0.2), "alpha": 0.5},
            "cavity": {"q": Normal(0.0, 0.1), "p0": p, "alpha": 1.0, "n_data": 2},
            "from_cavity": {"cavity": Normal(0.0, 0.5), "p0": p, "alpha": 1.0, "n_data": 2},
            "LinearGaussian": {"x": torch.ones(2, 1), "y": torch.zeros(2)}, "free_energy": energy,
            "bb_alpha_energy": energy | {"alpha": 0.5}, "power_ep_energy": energy | {"alpha": 0.5},
            "large_data_energy": energy | {"alpha": 0.5},
            "reparameterised_energy": {"cavity": prior, "p0": prior, "factors": line, "alpha": 0.5},
        },
    }  # fmt: skip
    rooms = {"metrics": metrics, "acquisition": acquisition, "divergences": divergences}
    return {f"{room}.{n}": (getattr(rooms[room], n), a) for room, told in found.items() for n, a in told.items()}


def _layers():
    linear = {"in_features": 4, "out_features": 3}
    return {
        "Dropout": (layers.Dropout, {}), "GaussianDropout": (layers.GaussianDropout, {}),
        "ConcreteDropout": (layers.ConcreteDropout, {}), "DropConnectLinear": (layers.DropConnectLinear, linear),
        "GaussianLinear": (layers.GaussianLinear, linear),
        "DropConnectLSTM": (layers.DropConnectLSTM, {"input_size": 4, "hidden_size": 3}),
        "DropConnectGRU": (layers.DropConnectGRU, {"input_size": 4, "hidden_size": 3}),
        "DropConnectConv2d": (layers.DropConnectConv2d, {"in_channels": 1, "out_channels": 2, "kernel_size": 3}),
        "mlp": (networks.mlp, {"sizes": (4, 8, 3)}), "cnn": (networks.cnn, {"filters": 2, "hidden": 4}),
    }  # fmt: skip


def _results():
    regression = predictive.RegressionPrediction(numbers(30, 6), torch.tensor(1.0))
    classes = prediction.classification_of(numbers(30, 6, 3))
    regressed, classed = {"prediction": regression}, {"prediction": classes}
    y, labels, groups = numbers(6), torch.arange(6) % 3, torch.arange(6) // 2
    sets = conformal.conformal_sets(classes, labels, coverage=0.5)
    return {
        "quantile": (regression.quantile, {"q": 0.5}),
        "interval": (regression.interval, {"coverage": 0.9}),
        "cdf": (regression.cdf, {"y": y}),
        "log_prob of a regression": (regression.log_prob, {"y": y}),
        "sample of a prediction": (regression.sample, {"n": 3}),
        "rescaled": (regression.rescaled, {"scale": 2.0}),
        "prediction_set": (classes.prediction_set, {"coverage": 0.9}),
        "log_prob of classes": (classes.log_prob, {"y": labels}),
        "joint_log_prob": (joint.joint_log_prob, {"prediction": regression, "y": y, "groups": groups}),
        "covariance": (joint.covariance, {"prediction": regression}),
        "conformal_intervals": (conformal.conformal_intervals, regressed | {"target": y, "coverage": 0.5}),
        "conformal_sets": (conformal.conformal_sets, classed | {"target": labels, "coverage": 0.5}),
        "ConformalIntervals.interval": (conformal.conformal_intervals(regression, y, coverage=0.5).interval, regressed),
        "ConformalSets.prediction_set": (sets.prediction_set, classed),
        "ClassificationSummary": (freezing.ClassificationSummary, {}),
        "RegressionSummary": (freezing.RegressionSummary, {"precision": 1.0}),
        "ClassificationSummary()": (freezing.ClassificationSummary(), {"outputs": numbers(5, 6, 3)}),
        "RegressionSummary()": (freezing.RegressionSummary(precision=1.0), {"outputs": numbers(5, 6, 1)}),
        "plots.entropy_histogram": (plots.entropy_histogram, {"entropies": {"a": torch.rand(9)}}),
        "plots.learning_curves": (plots.learning_curves, {"curves": {"a": [1.0, 2.0]}}),
        "plots.regression_bands": (plots.regression_bands, {"x": y, "prediction": regression}),
    }  # fmt: skip


SMALL = {
    "hidden_layer_sizes": (4,), "epochs": 2, "n_ensemble": 1, "random_state": 0, "n_predict_passes": 4, "n_passes": 2,
}  # fmt: skip
SETTINGS = [
    "alpha",
    "hidden_layer_sizes",
    "dropout",
    "input_dropout",
    "length_scale",
    "budget",
    "n_passes",
    "n_predict_passes",
    "balanced",
    "epochs",
    "batch_size",
    "learning_rate",
    "noise",
    "n_ensemble",
    "validation_fraction",
    "patience",
    "class_weight",
    "random_state",
]


def _classifier():
    X = numbers(30, 4).double().numpy()
    return estimators.BBAlphaClassifier(**SMALL).fit(X, X[:, 0] > 0)


def _fitted_with(kind, y):
    """A function of every setting of an estimator that fits it."""
    X = numbers(30, 4).double().numpy()
    plain = {k: v for k, v in kind().get_params().items() if k in SETTINGS} | SMALL

    def fitted(**settings):
        return kind(**{**SMALL, **settings}).fit(X, y(X))

    return fitted, plain


def _tables(folder):
    X = numbers(30, 4).double().numpy()
    y, labels = X[:, 0] + 0.1, X[:, 0] > 0
    regressor = estimators.BBAlphaRegressor(noise="constant", **SMALL).fit(X, y)
    classifier = _classifier()
    found = {
        "BBAlphaRegressor": _fitted_with(partial(estimators.BBAlphaRegressor), lambda X: X[:, 0]),
        "BBAlphaClassifier": _fitted_with(partial(estimators.BBAlphaClassifier), lambda X: X[:, 0] > 0),
        "BBAlphaRegressor.fit": (estimators.BBAlphaRegressor(noise="constant", **SMALL).fit, {"X": X, "y": y}),
        "BBAlphaClassifier.fit": (estimators.BBAlphaClassifier(**SMALL).fit, {"X": X, "y": labels}),
        "load_estimator": (estimators.load_estimator, {"path": folder / "nowhere"}),
        "BBAlphaRegressor.save": (regressor.save, {"path": folder / "regressor"}),
        "log_prob of an estimator": (regressor.log_prob, {"X": X, "y": y}),
        "predict_quantiles": (regressor.predict_quantiles, {"X": X, "q": 0.5}),
        "predict_interval": (regressor.predict_interval, {"X": X, "coverage": 0.9}),
        "sample_y": (regressor.sample_y, {"X": X, "n_samples": 2}),
        "predict_set": (classifier.predict_set, {"X": X, "coverage": 0.9}),
    }
    for name in ("predict", "unseen"):
        found[f"BBAlphaRegressor.{name}"] = getattr(regressor, name), {"X": X}
    for name in ("predict", "predict_proba", "predict_log_proba", "predict_entropy", "predict_mutual_information"):
        found[f"BBAlphaClassifier.{name}"] = getattr(classifier, name), {"X": X}
    import pandas

    frame = pandas.DataFrame(X, columns=list("abcd")).assign(y=y)
    found["fit_table"] = fit_table, {"frame": frame, "target": "y", "budget": 0.5}
    return found


def _others(folder):
    return {
        "save": (checkpoint.save, {"model": net(), "path": folder / "net"}),
        "load": (checkpoint.load, {"path": folder / "nowhere"}),
        "describe": (checkpoint.describe, {"model": net()}),
        "write_folder": (checkpoint.write_folder, {"path": folder / "any", "content": {"a": 1}}),
        "read_folder": (checkpoint.read_folder, {"path": folder / "nowhere"}),
        "load_uci": (data.load_uci, {"name": "nix", "offline": True}),
        "load_mnist": (data.load_mnist, {"part": "nix", "offline": True}),
        "fetch": (data.fetch, {"name": "nix"}),
        "uci_splits": (data.uci_splits, {"name": "yacht", "n_rows": 308}),
        "write_report": (report.write_report, {"html": "<p>", "path": folder / "page.html"}),
        "paper_report": (report.paper_report, {"results": folder / "nowhere"}),
    }
