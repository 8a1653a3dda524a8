"""``python -m offbeat.cli``: the same as the command ``offbeat``."""

from offbeat.cli import app

# Spawned processes import this file again under another name.
if __name__ == "__main__":
    app(prog_name="offbeat")
