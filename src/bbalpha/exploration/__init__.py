"""The least or largest value of something that is dear to measure: a loop of suggestions and observations."""

from bbalpha.exploration.loop import Explorer

__all__ = ["Explorer"]
