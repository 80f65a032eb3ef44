"""Carry a policy's weights into its engine: pause, send, check the version, resume; and go back where that fails.

One `WeightSync` per policy, on every trainer rank; only the sender holds the engine. Several replicas of an engine are one
engine here: their client counts all their workers. How the bytes travel is a `Transport`'s, which `choice` makes.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Protocol

from drmas.errors import EngineDied, EngineError, SyncError
from drmas.weights.transport import SyncClient, Transport


class SyncedEngine(Protocol):
    """The part of `drmas.rollout.engine.Engine` that a sync drives."""

    sync_client: SyncClient
    alive: bool

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What one push took, while the engine was paused; `bytes` is 0 on ranks that don't send."""

    seconds: float
    bytes: int


class WeightSync:
    """Pushes a policy's weights into `engine`, which is None on ranks that don't send.

    `version` is the last one pushed (0: the weights of the model folder).
    """

    def __init__(self, engine: SyncedEngine | None, transport: Transport) -> None:
        self.version = 0
        self._engine, self._transport = engine, transport
        self._staged: int | None = None
        self._trouble: Exception | None = None

    def stage(self, version: int) -> None:
        """Bring the weights to the engine's workers while it goes on with those that it has; `push` of this version loads them.

        Called on every rank, like `push`. Nothing happens where the transport can't. It raises nothing: the push does.
        """
        if not self._transport.can_stage:
            return
        self._staged, self._trouble = version, None
        self._transport.begin(version, staging=True)
        try:
            if self._engine is not None:
                self._trouble = self._stage(self._engine, version)
        finally:
            self._transport.settle()

    def unstage(self) -> None:
        """Forget what was staged: the engine was started anew and has lost it. Called on every rank."""
        self._staged = self._trouble = None
        self._transport.unstage()

    def push(self, version: int) -> SyncResult:
        """Make the engine's weights the trainer's, as `version`. Called on every rank, which all take their part.

        SyncError: the weights were not finite, didn't fit or didn't arrive; StagedLost: push again, on every rank. The engine
        then runs on with its old weights; only where some layers had changed already, or where it refuses to go back, it stays
        paused and takes no requests until a push succeeds. EngineDied: start the engine again and push again; replicas that
        live have gone back and are paused until then. Only the sender raises; it must tell the other ranks.
        """
        started = time.perf_counter()
        trouble = self._trouble if self._staged == version else None
        self._staged = self._trouble = None
        self._transport.begin(version)
        try:
            if trouble is not None:
                raise trouble
            sent = self._transport.send(None, version) if self._engine is None else self._send(self._engine, version)
        finally:
            self._transport.settle()
        self.version = version
        return SyncResult(time.perf_counter() - started, sent)

    def close(self) -> None:
        """Leave the engine's workers; the next push joins them anew."""
        self._transport.close()

    def _stage(self, engine: SyncedEngine, version: int) -> Exception | None:
        """What went wrong. The engine has noticed nothing."""
        for is_last in (False, True):
            try:
                self._transport.stage(engine.sync_client if _has_weights(engine) else None)
                return None
            except EngineDied as death:
                self._transport.close()
                return death
            except RuntimeError as error:
                self._transport.close()
                if is_last or isinstance(error, SyncError) or not self._transport.untouched:
                    kind = SyncError if isinstance(error, SyncError) else StagedLost
                    return kind(f"version {version} did not reach the engine: {error}")

    def _send(self, engine: SyncedEngine, version: int) -> int:
        """Bytes sent. A connection that turns out to be broken is made anew once, as long as the transport is untouched."""
        try:
            return self._attempt(engine, version)
        except _Broken as error:
            if self._transport.from_stage:
                raise StagedLost(str(error)) from error
            if not self._transport.untouched:
                raise
        return self._attempt(engine, version)

    def _attempt(self, engine: SyncedEngine, version: int) -> int:
        try:
            return self._update(engine, version)
        except EngineDied:
            self.close()
            with contextlib.suppress(EngineError):  # where there are other replicas, they give up this update as well
                _go_back(engine)
            raise
        except RuntimeError as error:  # EngineError and SyncError too, and what torch raises over a broken group
            self.close()
            kind = SyncError if isinstance(error, SyncError) else _Broken
            obstacle = _go_back(engine)
            raise kind(f"version {version} did not reach the engine: {error}{obstacle}") from error
        except BaseException:  # an interrupt, or a fault of ours: the engine goes on if it can
            self.close()
            with contextlib.suppress(EngineError):
                _go_back(engine)
            raise

    def _update(self, engine: SyncedEngine, version: int) -> int:
        client = engine.sync_client
        if not _has_weights(engine):
            client.finish_weight_update(str(version))
            return 0
        engine.pause()
        sent, expected = self._transport.send(client, version), str(version)
        if (found := client.get_weight_version()) != expected:
            raise SyncError(f"the engine reports version {found!r} after the update to {expected!r}")
        engine.resume()
        return sent


class StagedLost(SyncError):
    """What was staged is lost, and nothing else: push the version again, on every rank."""


class _Broken(SyncError):
    """The weights are not at fault; another attempt over a fresh connection may succeed."""


def _has_weights(engine: SyncedEngine) -> bool:
    return getattr(engine.sync_client, "num_workers", 0) > 0


def _go_back(engine: SyncedEngine) -> str:
    """Let the engine go on after a failure with its old weights: "", or what stands against it. EngineDied: it is gone."""
    obstacle = ""
    try:
        if _has_weights(engine):
            if engine.sync_client.abort_weight_update():
                engine.resume()
            else:
                obstacle = "; some of its layers have changed already, so it stays paused"
    except EngineDied:
        raise
    except EngineError as error:
        obstacle = f"; it can't go back to its old weights either: {error}"
    if not engine.alive:
        raise EngineDied("the engine died during a weight update")
    return obstacle
