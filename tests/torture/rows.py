"""A row of the campaign: what was tried, how often, and how often the product failed."""

UNITS = ("cases", "faults", "bytes", "requests")


def row(what, unit, tried, failures=(), *, explained=(), **more):
    """One line of the results.

    Args:
        what: What was attacked, in a few words.
        unit: What `tried` counts: cases of bad input, faults injected, bytes flipped or requests served.
        tried: How many.
        failures: A sentence for each time that the product failed.
        explained: A sentence for each failure that stays, with the reason.
        more: Other numbers.
    """
    if unit not in UNITS:
        raise ValueError(f"`unit` must be one of {', '.join(UNITS)}; got {unit!r}.")
    failures, explained = list(failures), list(explained)
    return {
        "what": what, "unit": unit, "tried": tried, "failures": len(failures), "told": " | ".join(failures[:20]),
        "explained": len(explained), "reasons": " | ".join(sorted(set(explained))), **more,
    }  # fmt: skip
