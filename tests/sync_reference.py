"""The old name of :mod:`tests.harness`."""

from tests.harness import *  # noqa: F403
