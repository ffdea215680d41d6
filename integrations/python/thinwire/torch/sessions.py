"""The sessions of single collectives, one for each process group and configuration."""

from __future__ import annotations

import functools
import weakref

import torch.distributed as dist

from thinwire.config import Config
from thinwire.torch.exchange.checkpoint import Residuals
from thinwire.torch.exchange.session import Session
from thinwire.torch.group import Membership


class GroupSessions:
    """The sessions of one process group, and the residuals that wait for sessions to come."""

    def __init__(self) -> None:
        self._sessions: dict[Config, Session] = {}
        self._restored: dict[str, Residuals] = {}  # by codec

    def session(self, group: dist.ProcessGroup, settings: Config) -> Session:
        """The one that all calls of this configuration share."""
        if settings not in self._sessions:
            session = Session(Membership(group, "all_reduce"), settings)
            session.close_with(group)
            session.load(self._restored.get(settings.codec, {}), 0)
            self._sessions[settings] = session
        return self._sessions[settings]

    def residuals(self) -> dict[str, Residuals]:
        """Those of named calls, by codec, with what was restored and not used yet."""
        found = {codec: dict(kept) for codec, kept in self._restored.items()}
        for settings, session in self._sessions.items():
            found.setdefault(settings.codec, {}).update(session.memory())
        return found

    def restore(self, residuals: dict[str, Residuals]) -> None:
        """Replaces all residuals; a session that is not there yet takes its codec's later."""
        self._restored = residuals
        for settings, session in self._sessions.items():
            session.load(residuals.get(settings.codec, {}), 0)


@functools.cache
def _by_group() -> weakref.WeakKeyDictionary[dist.ProcessGroup, GroupSessions]:
    return weakref.WeakKeyDictionary()


def sessions_of(group: dist.ProcessGroup) -> GroupSessions:
    return _by_group().setdefault(group, GroupSessions())
