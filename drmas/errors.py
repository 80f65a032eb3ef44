"""What can go wrong, by whose hand.

A message says the value found, what was expected, and the key or file to change. `UserError` and its kinds end a command with
one line on stderr and exit status 2, without a traceback; everything else is a fault of ours and keeps its traceback.
To add one: subclass the nearest kind here (and the stdlib class it replaces); it must pickle.
"""

from __future__ import annotations


class DrmasError(Exception):
    """Base of all errors raised on purpose."""


class UserError(DrmasError):
    """The user can mend it: configuration, files, environment."""


class ConfigError(UserError, ValueError):
    """A key or value of the configuration is wrong."""


class DataError(UserError, ValueError):
    """A dataset, rows file or run folder can't be used; names the file and the line."""


class ModelError(UserError, ValueError):
    """A model folder is missing, its family isn't supported, or its shape doesn't fit the layout."""


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, incomplete, of another run, or can't be written."""


class EngineError(DrmasError, RuntimeError):
    """The engine refused one request (prompt too long, bad ids); the engine itself is unharmed."""


class EngineTimeout(EngineError):
    """The engine answers, but did not answer this request in time."""


class TurnTimeout(EngineError):
    """A request of an agent took longer than `rollout.turn_timeout_seconds`."""


class EngineDied(EngineError):
    """The engine's process is gone or no longer answers; carries the tail of its log."""


class EngineStartError(UserError, EngineDied):
    """The engine did not come up; carries the tail of its log and where the whole log is."""


class RolloutError(UserError, RuntimeError):
    """Rollouts can't go on: an engine died too often, or every episode of a step failed. What was finished is saved."""


class ToolError(DrmasError, RuntimeError):
    """A tool could not be reached, did not answer in time, or answered against its own schema: the episode fails (I3)."""


class PromptTooLong(DrmasError, ValueError):
    """A prompt leaves no room for its response, and its agent doesn't have prompts truncated: the episode is dropped."""


class SyncError(DrmasError, RuntimeError):
    """Weights did not reach an engine whole, or were not finite; the engine keeps no half-loaded version."""


class GraderError(DrmasError, RuntimeError):
    """The grader's worker died on an answer."""


class GraderTimeout(GraderError, TimeoutError):
    """The grader did not finish within its deadline; its worker was killed and replaced."""


class TeamError(DrmasError, RuntimeError):
    """The team's own code raised or broke its contract."""
