"""The command line: ``offbeat demo``. It needs the packages of ``pip install 'offbeat[cli]'``."""

from __future__ import annotations

try:
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:
    raise ImportError(
        f"the command line needs {error.name}, which is not installed; run: pip install 'offbeat[cli]'"
    ) from error

from offbeat.cli.demo import demo

__all__ = ["app"]

app = typer.Typer(
    help="Distributed optimizers that update parameters during backward and communication.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo)


@app.callback()
def _root() -> None:
    """Distributed optimizers that update parameters during backward and communication."""
    # Without a callback typer would run the only command as "offbeat", and "offbeat demo" would be an error.
