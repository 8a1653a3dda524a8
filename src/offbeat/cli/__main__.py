"""``python -m offbeat.cli``: the same as the command ``offbeat``."""

from offbeat.cli import app

# Spawned workers import this file again under another name: only the first may start the program.
if __name__ == "__main__":
    app(prog_name="offbeat")
