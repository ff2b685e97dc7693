import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from bbalpha.data import UCIData
from bbalpha.experiments.search import Choice, Config
from bbalpha.experiments.variants import VARIANTS, Job, fit_and_score, fit_jobs, mixture

CONFIG = Config((10,), 16, (), n_folds=1, n_passes=3, n_test_passes=400, n_ensemble=3)
CHOICE = Choice(13 / 256, 0.0, 0.3, 8)
BARE = Choice(0.0, 0.0, 0.3, 8)


def data(n=80, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2)) * [1, 10]
    y = 50 + 7 * X[:, 0] + rng.normal(size=n)
    orders = [rng.permutation(n) for _ in range(3)]
    return UCIData("toy", X, y, tuple((o[:60], o[60:]) for o in orders))


@pytest.mark.parametrize("method", VARIANTS)
def test_scores_are_of_the_population_on_the_test_rows(method):
    toy, variant = data(), VARIANTS[method]
    alpha = (*variant.alphas, 1.0)[0]
    jobs = [Job(s, alpha, CHOICE if variant.dropout else BARE) for s in (0, 2)]
    found = fit_and_score(toy, variant, jobs, CONFIG)
    config = variant.config(CONFIG)
    population, owners = fit_jobs(toy, variant, jobs, config)
    assert len(owners) == 2 * (3 if variant.n_networks is None else 1)
    log_probs = population.log_likelihood(toy.X, toy.y, [toy.split(job.split)[1] for job in owners], n_passes=400)
    for job, score in zip(jobs, found, strict=True):
        own = torch.stack([p for p, owner in zip(log_probs, owners, strict=True) if owner == job])
        nll = -(own.logsumexp(0) - math.log(len(own))).mean()
        assert score["nll"] == pytest.approx(float(nll), abs=0.03)  # other masks, float64
        assert 0 <= score["coverage90"] <= 1


def test_jobs_of_any_group_come_back_in_their_order():
    toy, variant = data(), VARIANTS["bbalpha"]
    jobs = [Job(1, 0.5, Choice(5 / 256, 5 / 256, 1.0, 2)), Job(0, 0.0, CHOICE), Job(0, 1.0, Choice(0.25, 0.0, 1.0, 2))]
    together = fit_and_score(toy, variant, jobs, CONFIG)
    for job, score in zip(jobs, together, strict=True):
        assert fit_and_score(toy, variant, [job], CONFIG)[0] == pytest.approx(score, rel=1e-3)


def test_an_ensemble_is_the_mean_density_of_its_networks():
    toy, variant = data(), VARIANTS["ensemble"]
    population, _ = fit_jobs(toy, variant, [Job(0, 0.0, BARE)], variant.config(CONFIG))
    assert not torch.equal(population.weights[0][0][0], population.weights[0][0][1])  # seeds of their own
    rows = toy.split(0)[1]
    x, y = torch.as_tensor(toy.X[rows]), torch.as_tensor(toy.y[rows])
    density = 0
    for i in range(3):
        mean = population.network(i).double()((x - population.x_mean[i]) / population.x_scale[i])[:, 0].detach()
        scale = population.y_scale[i, 0, 0]
        std = scale * (-0.5 * population.log_precision[i]).exp().double()
        density = density + Normal(mean * scale + population.y_mean[i, 0, 0], std).log_prob(y).exp() / 3
    ours = mixture(population, range(3), x, CONFIG).log_prob(y[:, None])
    torch.testing.assert_close(ours.exp(), density)


def test_test_targets_change_no_weight():
    toy = data()
    changed = UCIData("toy", toy.X, toy.y.copy(), toy.splits)
    changed.y[toy.split(0)[1]] += 1000
    for method in ("bbalpha", "bbalpha-het"):
        variant = VARIANTS[method]
        a, b = (fit_jobs(d, variant, [Job(0, 0.5, CHOICE)], variant.config(CONFIG))[0] for d in (toy, changed))
        for (w, c), (v, d) in zip(a.weights, b.weights, strict=True):
            assert torch.equal(w, v)
            assert torch.equal(c, d)
        assert torch.equal(a.log_precision, b.log_precision)
