'''A Python function of the user's as a tool; its signature and docstring are its schema.

    def convert(amount: float, unit: Literal["m", "ft"] = "m") -> str:
        """Convert a length to the other unit."""
        if amount < 0:
            raise ValueError("a length is at least 0")          # the agent reads this
        ...

`[tools.units]` with `type = "python"` and `path = "path/to/units.py:convert"` makes it the tool `convert`. Parameters are
annotated with what JSON can carry (str, int, float, bool, list, dict, Literal, Optional, pydantic models); those with a default
may be left out. A function that isn't async runs in threads, several calls at once; one that is must not block its loop.

A plain ValueError is the function's answer to bad arguments and is told to the agent. Everything else that it raises,
subclasses of ValueError that libraries raise included, is trouble and fails the episode (I3). Made by `drmas.runtime.tools`.
'''

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
import typing
from collections.abc import Callable
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from drmas.agents.tools import shortened
from drmas.agents.user_code import load_object
from drmas.config.tasks import PythonTool
from drmas.errors import ConfigError, ToolError

MOST_THREADS = 32
"""Calls of one function that isn't async, at a time. One that never returns keeps its thread until the process ends."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class PythonFunction:
    """The function that `config.path` names, as a tool.

    ConfigError: no such function, or a parameter whose type JSON can't carry.
    """

    def __init__(self, section: str, config: PythonTool) -> None:
        self._where = f"tools.{section}"
        self.timeout_seconds = config.timeout_seconds
        self._most = config.max_result_chars
        self._function = load_object(config.path, f"{self._where}.path")
        if not inspect.isfunction(self._function):
            raise ConfigError(f"{self._where}.path is {config.path!r}, which is no function but {self._function!r:.100}")
        self._arguments = _arguments_of(self._function, self._where)
        self._threads = asyncio.Semaphore(MOST_THREADS)
        schema = self._arguments.json_schema(schema_generator=_Untitled)
        self.specs = [
            {
                "type": "function",
                "function": {
                    "name": self._function.__name__,
                    "description": inspect.getdoc(self._function) or "",
                    "parameters": {"type": "object", "properties": {}, **schema},
                },
            }
        ]

    async def start(self) -> None:
        pass

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Answers of the function that are no text are given as JSON."""
        try:
            values = self._arguments.validate_python(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            return f"{'.'.join(map(str, first['loc']))}: {first['msg']}", False
        if inspect.iscoroutinefunction(self._function):
            outcome = await _outcome_async(self._function, values)
        else:
            outcome = await self._in_thread(values)
        return self._read(name, *outcome)

    async def close(self) -> None:
        pass

    def _read(self, name: str, answer: Any, error: BaseException | None) -> tuple[str, bool]:
        if type(error) is ValueError:
            return shortened(str(error), self._most), False
        if error is not None:
            raise ToolError(f"{self._where}: {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, str):
            try:
                answer = json.dumps(answer, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as fault:
                raise ToolError(
                    f"{self._where}: {name} returned {type(answer).__name__} ({fault}); expected a text or a JSON value"
                ) from fault
        return shortened(answer, self._most), True

    async def _in_thread(self, values: dict[str, Any]) -> tuple[Any, BaseException | None]:
        """The function in a thread of its own, which nobody waits for: one that hangs can't be ended, and must hold up neither
        the loop's own threads nor the end of the process."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        await self._threads.acquire()

        def finish(outcome: tuple[Any, BaseException | None]) -> None:
            self._threads.release()
            if not done.done():
                done.set_result(outcome)

        def work() -> None:
            outcome = _outcome(self._function, values)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(finish, outcome)

        try:
            threading.Thread(target=work, name=self._where, daemon=True).start()
        except RuntimeError:  # no thread to be had
            self._threads.release()
            raise
        return await done


def _outcome(function: Callable[..., Any], values: dict[str, Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(**values), None
    except BaseException as error:  # also SystemExit, which would end the thread without a word
        return None, error


async def _outcome_async(function: Callable[..., Any], values: dict[str, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await function(**values), None
    except (Exception, SystemExit) as error:
        return None, error


def _arguments_of(function: Callable[..., Any], where: str) -> TypeAdapter[dict[str, Any]]:
    """What reads the arguments of `function`, by its annotations; arguments that are left out stay out."""
    name = function.__name__
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are the user's code
        raise ConfigError(f"{where}.path: the annotations of {name} can't be read: {type(error).__name__}: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in _NAMED:
            raise ConfigError(f"{where}.path: {name} has the parameter {parameter}; a tool's parameters are passed by name")
        if parameter.name not in hints:
            raise ConfigError(f"{where}.path: the parameter {parameter.name} of {name} has no annotation; expected str, say")
        fields[parameter.name] = _field(hints[parameter.name], parameter.default)
    arguments = TypedDict(f"{name}_arguments", fields)  # type: ignore[misc]
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    try:
        adapter = TypeAdapter(arguments)
        adapter.json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{where}.path: a parameter of {name} is of a type that JSON can't carry: {reason}") from error
    return adapter


def _field(hint: Any, default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return hint
    try:
        json.dumps(default)
    except (TypeError, ValueError):
        return NotRequired[hint]
    return NotRequired[Annotated[hint, Field(json_schema_extra={"default": default})]]


class _Untitled(GenerateJsonSchema):
    """Schemas without titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def typed_dict_schema(self, schema: Any) -> dict[str, Any]:
        found = super().typed_dict_schema(schema)
        found.pop("title", None)
        return found
