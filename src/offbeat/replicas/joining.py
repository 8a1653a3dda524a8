"""How a replica joins others that train: it takes over everything that one of them has."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.replicas.board import Board
from offbeat.replicas.contents import Contents, digest, local_part
from offbeat.replicas.level import Level, options_in_words
from offbeat.replicas.schedule import Schedule
from offbeat.wire.elastic import Elastic, ElasticMembership
from offbeat.wire.peers import ExchangeError, Traffic

__all__ = ["Joining", "connect_elastic"]


def connect_elastic(
    options: Elastic, contents: Contents, levels: Sequence[Level], name: str, traffic: Traffic
) -> ElasticMembership:
    """This replica's membership. Replicas of another model or with other options are refused by it."""
    (level,) = levels
    words = ", ".join(f"{key}={value}" for key, value in sorted(options_in_words(levels).items()) if key != "deadline")
    run = f"{name} {digest(contents.all_items())[:12]} {words}"
    return ElasticMembership(options, run, deadline=level.deadline, traffic=traffic)


class Joining:
    """The side of a replica that hands its state to newcomers, and takes it when it is one.

    Args:
        options: what is carried along.
        membership: finds the others.
        contents: the tensors of the optimizer and its module.
        board: the fragments and the rounds in flight.
        schedule: the run's clock.
    """

    def __init__(
        self, options: Elastic, membership: ElasticMembership, contents: Contents, board: Board, schedule: Schedule
    ) -> None:
        self._carry: Mapping[str, Any] = options.carry or {}
        self._membership, self._contents, self._board, self._schedule = membership, contents, board, schedule
        self._joined = False

    @torch.no_grad()
    def begin(self, load: Any) -> None:
        """Before training: take over the state of a replica that trains, if there is one.

        Args:
            load: loads the state dict of a replica.
        """
        state = self._membership.join()
        if state is None:
            return
        self._joined = True
        tensors = {item.name: local_part(item.tensor) for item in self._items()}
        sent: Mapping[str, Tensor] = state["tensors"]
        different = [name for name, t in tensors.items() if name not in sent or sent[name].shape != t.shape]
        if different or set(state["carry"]) != set(self._carry):
            what = f"{different[0]!r} is another" if different else f"it carries {sorted(state['carry'])}"
            raise ExchangeError(f"the state of the replica that trains does not fit here: {what}; nothing was changed")
        load(state["optimizer"])
        for name, tensor in tensors.items():
            tensor.copy_(sent[name])
        for name, carried in self._carry.items():
            carried.load_state_dict(state["carry"][name])
        for fragment in self._board:  # what the other has seen and lost is not this one's
            fragment.seen, fragment.moved, fragment.is_new = 0.0, False, True
            fragment.residual, fragment.residual_of = None, []

    def before_step(self) -> None:
        """Go to the clock of the others, if this replica has missed a round; refuse to begin anew beside a run."""
        membership = self._membership
        if membership.others_have_been and self._schedule.step == 0 and not self._joined:
            raise RuntimeError(
                "other replicas have trained with this lighthouse before and are gone, and this one would begin again "
                "at step 0. Load the newest checkpoint before the first step; to begin a new run, restart the "
                "lighthouse"
            )
        if membership.newest_round is not None:
            newest, membership.newest_round = membership.newest_round[0], None
            if newest >= self._schedule.step:
                self._board.land_all()
                self._schedule.go_to(newest + 1)

    def hand_over(self, state_dict: Any) -> None:
        """Note that training goes on, and hand a copy of everything to replicas that wait for it.

        Called at the beginning of a step, when schedulers have been stepped as often as the optimizer.

        Args:
            state_dict: makes the state dict of the replica.
        """
        self._membership.stepped()
        if not self._membership.server.is_wanted or (self._board.flights and self._is_between_landings()):
            return
        try:
            self._membership.server.publish(
                {
                    "tensors": {item.name: local_part(item.tensor).cpu().clone() for item in self._items()},
                    "optimizer": _copied(state_dict()),
                    "carry": {name: _copied(carried.state_dict()) for name, carried in self._carry.items()},
                }
            )
        except TypeError as error:  # something that cannot be sent: training goes on, and the other is told in time
            warnings.warn(f"a replica that wants to join cannot be given this one's state: {error}", stacklevel=5)

    def _is_between_landings(self) -> bool:
        """Whether there will soon be a step without a round in flight: then nothing has to be waited for."""
        periods = {fragment.level.every: fragment.level.delay for fragment in self._board}
        return all(isinstance(every, int) and delay < every for every, delay in periods.items())

    def _items(self) -> list[Any]:
        return [*self._contents.all_items(), *self._contents.buffers()]


def _copied(value: Any) -> Any:
    """The value with its tensors copied to CPU memory."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
