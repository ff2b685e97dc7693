"""Training: one loop for any model, and populations of networks trained as one."""

from bbalpha.training.bank import Member
from bbalpha.training.fitting import cosine, fit
from bbalpha.training.loop import History, Progress
from bbalpha.training.population import Population, fit_population
from bbalpha.training.retrofitting import Retrofit, retrofit
from bbalpha.training.shards import Shards

__all__ = [
    "History", "Member", "Population", "Progress", "Retrofit", "Shards", "cosine", "fit", "fit_population", "retrofit",
]  # fmt: skip
