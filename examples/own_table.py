"""A table of your own, with text, dates and gaps: fitted, judged on rows it has not seen, kept, and asked odd things.

python examples/own_table.py    (the table is made up here; yours comes from pandas.read_csv)
"""

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from bbalpha import BBAlphaRegressor, load_estimator

random, n = np.random.default_rng(3), 900
flats = pd.DataFrame(
    {
        "rooms": random.integers(1, 7, n),
        "area": random.gamma(9, 9, n).round(1),
        "district": random.choice(["north", "south", "harbour", "old town"], n, p=[0.4, 0.3, 0.2, 0.1]),
        "sold": pd.Timestamp("2024-01-01") + pd.to_timedelta(random.integers(0, 900, n), unit="D"),
    }
)
worth = 1500 * flats.area * (1 + 0.2 * (flats.district == "harbour")) + 20000 * flats.rooms
price = worth + random.normal(0, 1, n) * (8000 + 100 * flats.area)  # what is dear scatters more
flats.loc[random.random(n) < 0.05, "area"] = np.nan

X_train, X_test, y_train, y_test = train_test_split(flats, price, random_state=0)
model = BBAlphaRegressor(budget="quick", random_state=0).fit(X_train, y_train)
low, high = model.predict_interval(X_test, coverage=0.9, guarantee=True)
print(f"variance explained {model.score(X_test, y_test):.2f}")
print(f"inside the 90 % intervals {((low <= y_test) & (y_test <= high)).mean():.2f}")

model.save("flats")
model = load_estimator("flats")
odd = X_test[:3].copy()
odd["district"] = odd["district"].where([True, False, True], "moon")
odd["area"] = [80.0, 80.0, 900.0]
mean, std = model.predict(odd, return_std=True)
for what, m, s, cells in zip(("ordinary", "on the moon", "huge"), mean, std, model.unseen(odd), strict=True):
    print(f"{what:12} {m:10,.0f} ± {s:9,.0f}, cells unlike any at fit: {cells}")
