"""A site of several ranks, which train together and take part in rounds as one member.

The first rank of the site communicates with the other sites and keeps the state of rounds; the
others follow it. At a point where a round may begin or end:

1. All ranks exchange the work that they have counted, and the first one decides what happens now.
2. If a round begins, they compare digests of its parameters: the first rank's update is that of all
   only if all have the same bits.
3. The first rank does what is due, and sends heartbeats, so that the others wait as long as a round
   takes, but only while the first rank lives.
4. It sends its progress, and all get its parameters by a broadcast of the site's process group.

A lost rank fails the site: the first rank leaves the round, and the other sites continue."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from thinwire import errors
from thinwire.comm import one_line
from thinwire.config import Config
from thinwire.torch import group
from thinwire.torch.agree import digest
from thinwire.torch.sites.fragments import Fragment
from thinwire.torch.sites.meeting import Epoch, Meeting
from thinwire.torch.sites.round import WEIGHTS, check_counts

NOTHING, ACT, BEGIN = range(3)  # the action at a point; BEGIN: a round begins

# The action, the fragment, the counted work, its kind as an index into WEIGHTS, and a digest of the
# values that must be equal.
_PLAN = struct.Struct("<BIdBQ")
_DIGEST = struct.Struct("<Q")
_PROGRESS = struct.Struct("<?QQQI")  # whether the action is over, and Progress
_SIGN_S = 0.25  # the most seconds between two heartbeats
_SIGNS = 8  # the least number of heartbeats in a timeout


class Progress(NamedTuple):
    """The progress of the first rank."""

    rounds: int  # committed rounds
    since: int  # steps since the last round began
    steps: int  # steps between rounds
    open: int  # open rounds


class Site:
    """This rank's place in its site. All ranks of the site make the same calls, except lead() and
    follow()."""

    def __init__(
        self,
        site_group: dist.ProcessGroup,
        fragments: Sequence[Fragment],
        settings: Config,
        alike: str,
        anchors: bool,
    ) -> None:
        """settings: of the connections to other sites; only the timeout is used. alike: values that
        must be equal on all ranks. anchors: whether the other ranks need the anchors, too."""
        self._group = group.resolve(site_group, "site_group")
        self._fragments, self._anchors = list(fragments), anchors
        joined = group.join(self._group, "site")
        names = tuple(f"rank {rank}" for rank in range(joined.size))
        settings = dataclasses.replace(settings, interface=None)
        self._meeting = Meeting(Epoch(0, joined, names), settings)
        timeout_s = settings.timeout_s or joined.timeout_s
        self._sign_s = min(_SIGN_S, timeout_s / _SIGNS)
        names = [(n, p.shape, p.dtype) for f in fragments for n, p in f.parameters.items()]
        self._alike = _short(f"{alike} {names}".encode())
        self.rank, self.leads = joined.rank, joined.rank == 0
        self.open = 0  # open rounds of the first rank

    def plan(self, happens: int, fragment: int, work: float, counts: str) -> tuple[int, float]:
        """Return the action that the first rank has decided on, and the work that all other ranks
        have counted. counts: the kind of the work, one of WEIGHTS. MismatchError on all ranks if
        their values differ, or if a round begins and their parameters differ."""
        mine = _PLAN.pack(happens, fragment, work, WEIGHTS.index(counts), self._alike)
        told = [_PLAN.unpack(each) for each in self._meeting.tell("plan", mine)]
        others = [rank for rank, each in enumerate(told) if each[4] != told[0][4]]
        if others:
            raise errors.MismatchError(
                f"ranks {others} of the site have other fragments, sync_every or options than its "
                "rank 0; pass the same arguments on all ranks of a site"
            )
        check_counts({f"rank {rank} of the site": each[3] for rank, each in enumerate(told)})
        happens, fragment = told[0][:2]
        if happens == BEGIN:
            self._check_equal(self._fragments[fragment])
        return happens, sum(each[2] for each in told[1:])

    def _check_equal(self, fragment: Fragment) -> None:
        digests = b"".join(_DIGEST.pack(digest(p)) for p in fragment.parameters.values())
        told = self._meeting.tell("equal", hashlib.sha256(digests).digest()[:16])
        others = [rank for rank, each in enumerate(told) if each != told[0]]
        if others:
            raise errors.MismatchError(
                f"fragment {fragment.number}: ranks {others} of the site have other parameters "
                "than its rank 0, expected the same bits; train a site by "
                "DistributedDataParallel or thinwire's compress(), with the same optimizer on all "
                "ranks"
            )

    def lead(self, action: Callable[[], None], interrupt: Callable[[errors.Error], None]) -> None:
        """On the first rank: run `action` while the others wait. If one of them is lost meanwhile,
        call `interrupt` on another thread, which must end `action`, and raise that error. An error
        of `action` is sent to the others, and raised."""
        over = threading.Event()
        lost: list[errors.Error] = []

        def give_signs() -> None:
            while not over.wait(self._sign_s):
                try:
                    self._tell(False, Progress(0, 0, 0, 0), ())
                except errors.Error as error:
                    lost.append(error)
                    interrupt(error)
                    return

        signs = threading.Thread(target=give_signs, name="thinwire site", daemon=True)
        signs.start()
        try:
            action()
        except BaseException as error:
            if not lost:
                self.fail(error)
                raise
        finally:
            over.set()
            signs.join()
        if lost:
            raise errors.again(lost[0])

    def finish(self, progress: Progress, changed: set[int]) -> None:
        """On the first rank, after lead(): send its progress and the changed fragments to the
        others."""
        self._tell(True, progress, changed)
        self.open = progress.open
        self._share(changed)

    def follow(self) -> Progress:
        """On the other ranks: wait until the first one has done what is due, and take its
        parameters. Return its progress. Raises the error of the first rank, or PeerLostError if it
        is lost."""
        while True:
            told = self._tell(False, Progress(0, 0, 0, 0), ())
            if told[0]:
                break
        progress = Progress(*_PROGRESS.unpack_from(told)[1:])
        self.open = progress.open
        self._share({at for at, each in enumerate(told[_PROGRESS.size :]) if each})
        return progress

    def _tell(self, over: bool, progress: Progress, changed: set[int] | tuple[()]) -> bytes:
        """Make one exchange. Return the bytes of the first rank."""
        flags = bytes(at in changed for at in range(len(self._fragments)))
        return self._meeting.tell("progress", _PROGRESS.pack(over, *progress) + flags)[0]

    def _share(self, changed: set[int]) -> None:
        first = dist.get_process_group_ranks(self._group)[0]
        try:
            for fragment in (self._fragments[at] for at in sorted(changed)):
                for name, p in fragment.parameters.items():
                    values = p.detach().contiguous()  # because a parameter may be channels_last
                    dist.broadcast(values, first, group=self._group)
                    if not p.is_contiguous():
                        p.detach().copy_(values)
                    if self._anchors:
                        anchor = fragment.anchor[name].to(p.device).contiguous()
                        dist.broadcast(anchor, first, group=self._group)
                        fragment.anchor[name] = anchor.cpu()
        except RuntimeError as error:
            lost = errors.PeerLostError(
                f"rank {self.rank} of the site: the broadcast of parameters failed ({error}); look "
                "at the site's other ranks"
            )
            self._meeting.fail(lost)
            raise lost from None

    def fail(self, error: BaseException) -> None:
        """Send all ranks of the site the reason why this one ends."""
        if not isinstance(error, errors.Error):
            error = errors.Error(f"rank {self.rank} of the site ended on {one_line(error)}")
        self._meeting.fail(error)

    def close(self) -> None:
        """Close the site's connections. A second call does nothing."""
        self._meeting.close()


def check_group(site_group: object) -> dist.ProcessGroup | None:
    """Return the process group of a site of several ranks, or None for a site of one."""
    if site_group is None:
        return None
    members = group.resolve(site_group, "site_group")
    return members if dist.get_world_size(members) > 1 else None


def _short(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
