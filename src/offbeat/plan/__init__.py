"""What training over a link costs: estimates, recommendations, and probes of the real link.

``offbeat.plan`` is imported when it is first used::

    import offbeat
    offbeat.plan.estimate(params=1e9, step_seconds=0.1, replicas=2, bandwidth=125e6, codec="int4").utilisation
"""

from offbeat.plan.choose import Option, compare, recommend
from offbeat.plan.cost import BACKWARD, Estimate, Machine, estimate
from offbeat.plan.result import BenchResult, ResultError, load_result, save_result
from offbeat.plan.settings import Settings

__all__ = [
    "BACKWARD",
    "BenchResult",
    "Estimate",
    "Machine",
    "Option",
    "ResultError",
    "Settings",
    "compare",
    "estimate",
    "load_result",
    "recommend",
    "save_result",
]
