"""A made-up table with everything that real ones have."""

import numpy as np
import pandas as pd


def houses(n: int = 240) -> pd.DataFrame:
    """Text, dates, truth values, gaps, an identifier, a constant, a missing target."""
    rng = np.random.default_rng(0)
    size, town = rng.uniform(50, 200, n), rng.choice(["Rome", "Paris", "Oslo"], n)
    price = 2 * size + 60 * (town == "Paris") + 10 * rng.normal(size=n)
    frame = pd.DataFrame({
        "id": [f"h{i}" for i in range(n)], "size": size, "town": town, "rooms": rng.integers(1, 6, n).astype(float),
        "garden": rng.random(n) < 0.5, "sold": pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(n), "D"),
        "street": rng.integers(0, 30, n), "country": "EU", "price": price,
    })  # fmt: skip
    frame.loc[::10, "rooms"] = np.nan
    frame.loc[3, "price"] = np.nan
    return frame
