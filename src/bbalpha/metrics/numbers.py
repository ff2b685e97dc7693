"""Numbers that go into a score, checked: real, finite, of the shape they should have."""

from torch import Tensor

from bbalpha.checks import check_real


def finite(name: str, t: Tensor, *, infinite: bool = False) -> Tensor:
    """`t` in float64, without nan, not empty."""
    check_real(name, t)
    if not t.numel():
        raise ValueError(f"`{name}` must not be empty; got shape {tuple(t.shape)}.")
    bad = t.isnan() if infinite else ~t.isfinite()
    if bool(bad.any()):
        rule = "not be nan" if infinite else "be finite"
        raise ValueError(f"`{name}` must {rule}; got {float(t[bad][0])} at index {bad.nonzero()[0].tolist()}.")
    return t.detach().double()


def one_axis(name: str, t: Tensor) -> None:
    """Refuse what is not one number a row."""
    if t.ndim != 1:
        raise ValueError(
            f"`{name}` must have one number a row, (N,); got shape {tuple(t.shape)}. Flatten or average it."
        )


def same_shape(name: str, t: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse what has not the shape of the other."""
    if t.shape != other.shape:
        other_name = other_name if "`" in other_name else f"`{other_name}`"
        raise ValueError(f"`{name}` must have the shape of {other_name}, {tuple(other.shape)}; got {tuple(t.shape)}.")
