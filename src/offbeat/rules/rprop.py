r"""Rprop: each element has its own step size, which grows while the sign of its gradient stays the same.

.. math::
    \eta &\leftarrow \begin{cases}
        \min(\eta\,\eta_+, \Gamma_{max}) & g_{prev}\, g > 0 \\
        \max(\eta\,\eta_-, \Gamma_{min}),\; g \leftarrow 0 & g_{prev}\, g < 0 \\
        \text{unchanged} & \text{else}\end{cases} \\
    \theta &\leftarrow \theta - \eta\,\mathrm{sign}(g), \qquad g_{prev} \leftarrow g

Reference: Riedmiller and Braun, ICNN 1993.
"""

from __future__ import annotations

from typing import Any

from offbeat.rules.checks import learning_rate, pair
from offbeat.rules.ops import maximum, minimum, sign, where
from offbeat.rules.rule import Hyper, Rule, Slot, Values


def check_etas(value: Any) -> None:
    pair("etas", value)
    if not 0.0 < value[0] < 1.0 < value[1]:
        raise ValueError(f"Invalid eta values: {value[0]}, {value[1]} (must be 0 < etaminus < 1 < etaplus)")


def check_step_sizes(value: Any) -> None:
    pair("step_sizes", value)
    if not value[0] <= value[1]:
        raise ValueError(f"Invalid step_sizes: {value[0]}, {value[1]} (must be smallest, then largest)")


def coefficients(h: Values, s: Values) -> dict[str, Any]:
    return {"etaminus": h.etas[0], "etaplus": h.etas[1], "smallest": h.step_sizes[0], "largest": h.step_sizes[1]}


def rprop(p, g, prev, step_size, c):  # type: ignore[no-untyped-def]
    if c.maximize:
        g = -g
    agreement = g * prev
    grown, shrunk = step_size * c.etaplus, step_size * c.etaminus
    step_size = where(agreement > 0, grown, where(agreement < 0, shrunk, step_size))
    step_size = minimum(maximum(step_size, c.smallest), c.largest)
    g = where(agreement < 0, 0.0, g)
    return p - sign(g) * step_size, g, step_size


RPROP = Rule(
    name="Rprop",
    hyper=(
        learning_rate(1e-2),
        Hyper("etas", (0.5, 1.2), check_etas, "factors by which a step size shrinks and grows", "tuple[float, float]"),
        Hyper("step_sizes", (1e-6, 50), check_step_sizes, "smallest and largest step size", "tuple[float, float]"),
    ),
    slots=lambda h: (Slot("step", scalar=True), Slot("prev"), Slot("step_size", init=lambda h: h.lr, late=True)),
    structure=lambda h: {"maximize": h.maximize},
    coefficients=coefficients,
    update=rprop,
)
