"""Hamiltonian Monte Carlo on a network of one hidden layer: the posterior that the other methods approximate.

    posterior = sample_posterior(x, y, x_test, settings=Settings(), seed=0)
    posterior.outputs, posterior.precision, posterior.diagnostics

The model, for standardised rows: f(x) = relu(x W1 + b1) W2 + b2 with weights and biases N(0, 1), y = f(x) + noise, and
Gamma(1, 0.1), of mean 10, for the precision of the noise. With a half-Cauchy prior for its deviation, which lets the
noise vanish, chains on yacht (300 rows, fewer than there are weights) ended at a tiny noise and did not agree.

HMC with trajectories of a fixed number of steps rather than NUTS, which diverged often on such posteriors. The chains
are not fully mixed: read the scores beside their R-hat.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bbalpha.experiments.skeleton import extra

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Settings:
    """How long to sample.

    Attributes:
        hidden: Units of the hidden layer.
        n_chains: Chains, started from different points.
        n_start: Steps of Adam towards high density before the warm-up.
        n_warmup: Trajectories in which the step size is tuned; thrown away.
        n_samples: Trajectories a chain that are kept.
        n_leapfrog: Gradients a trajectory.
        target_accept: The acceptance that the step size is tuned to.
    """

    hidden: int = 50
    n_chains: int = 2
    n_start: int = 1000
    n_warmup: int = 250
    n_samples: int = 250
    n_leapfrog: int = 200
    target_accept: float = 0.8


@dataclass(frozen=True, eq=False)
class Posterior:
    """Draws from the posterior, in standardised units.

    Attributes:
        outputs: f at the test rows (chains, draws, M).
        precision: One over the variance of the noise (chains, draws).
        diagnostics: accept, rhat, rhat_worst, divergences, n_samples.
    """

    outputs: Tensor
    precision: Tensor
    diagnostics: dict[str, float]


def sample_posterior(x: Tensor, y: Tensor, x_test: Tensor, *, settings: Settings, seed: int) -> Posterior:
    """Draws of f at x_test (M, d) and of the noise, given x (N, d) and y (N,)."""
    jax = extra("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        rows, targets, new = (jax.numpy.asarray(a.numpy(), dtype="float32") for a in (x, y, x_test))
        energy = _energy(jax, rows, targets)
        start = _start(jax, energy, rows.shape[1], settings, seed)
        draws, accept, diverging = _run(energy, start, settings, jax.random.key(seed))
        outputs = np.asarray(jax.lax.map(jax.vmap(lambda draw: _network(jax, draw, new)), draws))
        noise = np.exp(np.asarray(draws["log_noise"], dtype=np.float64))  # (chains, draws)
    diagnostics = _diagnostics(outputs.astype(np.float64), np.asarray(accept), np.asarray(diverging))
    return Posterior(torch.tensor(outputs).double(), torch.tensor(noise**-2.0), diagnostics)


def _diagnostics(outputs: Array, accept: Array, diverging: Array) -> dict[str, float]:
    """How the chains did, from f (chains, draws, M), acceptance and divergences (chains, draws)."""
    rhat = extra("numpyro.diagnostics").split_gelman_rubin(outputs)  # (M,)
    return {
        "accept": float(accept.mean()),
        "rhat": float(np.median(rhat)),
        "rhat_worst": float(np.max(rhat)),
        "divergences": int(diverging.sum()),
        "n_samples": accept.size,
    }


def _network(jax: Any, p: dict[str, Any], x: Any) -> Any:
    """f(x): (N, d) -> (N,)."""
    return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def _energy(jax: Any, x: Any, y: Any) -> Any:
    """Minus the log of the joint density, up to a constant, as a function of the parameters."""

    def energy(p: dict[str, Any]) -> Any:
        s = p["log_noise"]
        error = ((y - _network(jax, p, x)) ** 2).sum()
        likelihood = 0.5 * jax.numpy.exp(-2 * s) * error + len(y) * s
        weights = 0.5 * sum((p[name] ** 2).sum() for name in ("w1", "b1", "w2", "b2"))
        noise = 0.1 * jax.numpy.exp(-2 * s) + 2 * s  # Gamma(1, 0.1) for tau = exp(-2 s), as a density of s
        return likelihood + weights + noise

    return energy


def _start(jax: Any, energy: Any, d: int, settings: Settings, seed: int) -> Any:
    """A point of high density for each chain, from a random one: parameters with chains in front.

    The noise stays at a fifth of the deviation of the targets meanwhile. Adam would make it as small as a network with
    the best weights allows, far smaller than typical ones do, and the chains would be long in coming back.
    """
    rng, H = np.random.default_rng(seed), settings.hidden
    shapes = {"w1": ((d, H), d), "b1": ((H,), d), "w2": ((H,), H), "b2": ((), H)}  # and the inputs of a unit
    p = {
        name: jax.numpy.asarray(rng.normal(0, fan_in**-0.5, (settings.n_chains, *shape)), dtype="float32")
        for name, (shape, fan_in) in shapes.items()
    }
    log_noise = jax.numpy.full(settings.n_chains, np.log(0.2), dtype="float32")
    total = lambda p: jax.vmap(energy)(p | {"log_noise": log_noise}).sum()  # noqa: E731
    adam = extra("numpyro.optim").Adam(0.01)
    step = lambda _, state: adam.update(jax.grad(total)(adam.get_params(state)), state)  # noqa: E731
    state = jax.jit(lambda state: jax.lax.fori_loop(0, settings.n_start, step, state))(adam.init(p))
    return adam.get_params(state) | {"log_noise": log_noise}


def _run(energy: Any, start: Any, settings: Settings, key: Any) -> tuple[Any, Any, Any]:
    """Draws (chains, draws, ...), acceptance and divergences (chains, draws)."""
    infer = extra("numpyro.infer")
    kernel = infer.HMC(
        potential_fn=energy, step_size=1e-3, num_steps=settings.n_leapfrog, trajectory_length=None,
        adapt_mass_matrix=False, target_accept_prob=settings.target_accept,
    )  # fmt: skip
    chains = infer.MCMC(
        kernel, num_warmup=settings.n_warmup, num_samples=settings.n_samples, num_chains=settings.n_chains,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    chains.run(key, init_params=start, extra_fields=("accept_prob", "diverging"))
    told = chains.get_extra_fields(group_by_chain=True)
    return chains.get_samples(group_by_chain=True), told["accept_prob"], told["diverging"]
