"""Training: one loop for any model, and populations of networks trained as one."""

from bbalpha.training.bank import Member
from bbalpha.training.fitting import cosine, fit
from bbalpha.training.loop import History, Progress
from bbalpha.training.population import Population, fit_population

__all__ = ["History", "Member", "Population", "Progress", "cosine", "fit", "fit_population"]
