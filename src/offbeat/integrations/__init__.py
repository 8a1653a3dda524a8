"""offbeat inside Lightning, Accelerate and Transformers.

In a checkout of offbeat ``pip install ".[integrations]"`` installs the versions that they are tested with.

- :mod:`offbeat.integrations.lightning`: a callback for Lightning's ``Trainer``
- :mod:`offbeat.integrations.fabric`: sets up a model and its optimizers with Fabric
- :mod:`offbeat.integrations.accelerate`: prepares them with an ``Accelerator``
- :mod:`offbeat.integrations.transformers`: attaches offbeat to the ``Trainer`` of Transformers

``import offbeat`` imports nothing of this.
"""

from offbeat.integrations.handles import handle_of

__all__ = ["handle_of"]
