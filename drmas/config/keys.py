"""The keys of the schema as data: which dotted keys exist, of what type, and which one an unknown key was meant to be.

Derived from the pydantic models, so it can't drift from them. Called by `load` (where a value may go, how text becomes one),
by `drmas config explain` and by the tests that check the keys written in documents. It reads no files and holds no values.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drmas.config.schema import RunConfig
from drmas.errors import ConfigError

ALIASES: dict[str, tuple[str, ...]] = {
    # one word of another system -> the keys that say the same here; the last part of an unknown key is looked up
    **dict.fromkeys(("n", "num_generations", "n_samples_per_prompt", "num_generations_per_prompt"), ("rollout.group_size",)),
    **dict.fromkeys(("rollouts_per_example", "rollout_n", "n_agent"), ("rollout.group_size",)),
    **dict.fromkeys(("eps_clip", "clip_ratio", "cliprange", "clip_eps", "clip_epsilon"), ("loss.clip_low", "loss.clip_high")),
    **dict.fromkeys(("clip_ratio_low", "epsilon_low", "epsilon"), ("loss.clip_low",)),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_high", "epsilon_high"), ("loss.clip_high",)),
    **dict.fromkeys(("clip_ratio_c", "eps_clip_c"), ("loss.dual_clip",)),
    **dict.fromkeys(("entropy_coeff", "entropy_coef"), ("loss.entropy_bonus",)),
    **dict.fromkeys(("loss_agg_mode", "loss_type"), ("loss.aggregation",)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "estimator"), ("advantage.preset",)),
    "group_by_agent_id": ("advantage.mean", "advantage.std"),
    "norm_adv_by_std_in_grpo": ("advantage.std",),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size", "num_mini_batches"), ("train.updates_per_step",)),
    **dict.fromkeys(("train_batch_size", "rollout_batch_size", "global_batch_size"), ("rollout.tasks_per_step",)),
    **dict.fromkeys(
        ("micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "max_tokens_per_gpu"),
        ("policies.NAME.tokens_per_microbatch",),
    ),
    **dict.fromkeys(("total_training_steps", "max_steps", "num_rollout"), ("train.steps",)),
    **dict.fromkeys(("total_epochs", "num_train_epochs", "num_epochs"), ("train.epochs",)),
    **dict.fromkeys(("learning_rate",), ("policies.NAME.lr",)),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), ("policies.NAME.clip_grad_norm",)),
    **dict.fromkeys(("model_path", "model_name_or_path", "hf_checkpoint"), ("policies.NAME.model",)),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "tensor_parallel_size", "tp"),
        ("policies.NAME.tensor_parallel", "policies.NAME.engine.tensor_parallel"),
    ),
    "gpu_memory_utilization": ("policies.NAME.engine.gpu_memory_fraction",),
    **dict.fromkeys(("max_model_len", "max_prompt_length"), ("policies.NAME.engine.max_model_tokens",)),
    "max_num_seqs": ("policies.NAME.engine.max_concurrent",),
    **dict.fromkeys(("save_freq", "save_steps", "save_interval"), ("checkpoint.every_steps",)),
    **dict.fromkeys(("max_new_tokens", "max_completion_length", "max_response_length"), ("team.AGENT.max_tokens",)),
    "output_dir": ("output",),
    "experiment_name": ("name",),
}

NAME = "NAME"
"""Stands for the key of a named section: policies.NAME.lr."""


@dataclass(frozen=True)
class Node:
    """One key of the schema: a value, a section with children, a named-section table, or a free table (`any_below`)."""

    path: tuple[str, ...]
    type: str
    default: Any = None
    required: bool = False
    help: str = ""
    children: dict[str, Node] = field(default_factory=dict)
    variants: dict[str, dict[str, Node]] = field(default_factory=dict)
    """Children by the value of `type`, where a section has several shapes."""
    shapes: dict[str, str] = field(default_factory=dict)
    """What each shape is, by the same values."""
    any_below: bool = False
    takes_text: bool = False
    optional: bool = False

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def is_section(self) -> bool:
        return bool(self.children)

    def child(self, name: str) -> Node | None:
        return self.children.get(name) or self.children.get(NAME)

    def walk(self) -> Iterator[Node]:
        """This key and all keys below it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a union, with `Annotated` taken off; a plain type is its own only alternative."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _bounds(metadata: Sequence[Any]) -> str:
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    found = [
        f"{sign} {getattr(item, name):g}" for item in metadata for name, sign in signs if getattr(item, name, None) is not None
    ]
    return " and ".join(found)


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type as a user reads it: `integer > 0`, `agent | task | none`, `list of text`, `table`.

    Example: type_text(Annotated[float, Gt(0)] | None) == "number > 0, or unset"
    """
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return type_text(inner, [*metadata, *extra])
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [type_text(part, metadata) for part in get_args(annotation) if part is not type(None)]
        return " | ".join(dict.fromkeys(parts)) + (", or unset" if type(None) in get_args(annotation) else "")
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {type_text(get_args(annotation)[0])}"
    names = {int: "integer", float: "number", str: "text", bool: "true | false"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    base = names.get(annotation, "table" if (get_origin(annotation) or annotation) is dict else str(annotation))
    bounds = _bounds([item for part in metadata for item in (part, *getattr(part, "metadata", ()))])
    return f"{base} {bounds}".strip()


def _either(first: Node, other: Node) -> Node:
    """A key that several shapes of a section have: the first one's, which takes what any of them takes."""
    return replace(first, takes_text=first.takes_text or other.takes_text, optional=first.optional or other.optional)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _node(path: tuple[str, ...], annotation: Any, info: FieldInfo | None) -> Node:
    kinds = [kind for kind in _members(annotation) if kind is not type(None)]
    models = [kind for kind in kinds if _is_model(kind)]
    tables = [get_args(kind)[1] for kind in kinds if get_origin(kind) is dict]
    children: dict[str, Node] = {}
    variants: dict[str, dict[str, Node]] = {}
    for model in models:
        own = {name: _node((*path, name), field_.annotation, field_) for name, field_ in model.model_fields.items()}
        children |= {name: _either(children[name], node) if name in children else node for name, node in own.items()}
        if len(models) > 1:
            variants[model.model_fields["type"].default] = own
    for value in tables:
        if value is not Any:
            children[NAME] = _node((*path, NAME), value, None)
    if len(models) > 1:
        # the shared key that picks the shape accepts every shape's name
        children["type"] = Node((*path, "type"), " | ".join(variants), required=True, takes_text=True)
    documented = models[0].__doc__ if len(models) == 1 else "`type` picks the shape." if models else ""
    help_text = (info.description if info else None) or documented or ""
    required = info is not None and info.is_required()
    return Node(
        path=path,
        type=type_text(annotation, info.metadata if info else ()),
        default=None if info is None or required else info.get_default(call_default_factory=True),
        required=required,
        help=" ".join(help_text.split()),
        children=children,
        variants=variants,
        shapes={shape: " ".join((model.__doc__ or "").split()) for shape, model in zip(variants, models, strict=False)},
        any_below=any(value is Any for value in tables),
        takes_text=any(kind is str or get_origin(kind) is Literal for kind in kinds),
        optional=type(None) in _members(annotation),
    )


ROOT = Node(
    path=(),
    type="section",
    help=" ".join((RunConfig.__doc__ or "").split()),
    children={name: _node((name,), info.annotation, info) for name, info in RunConfig.model_fields.items()},
)


def find(path: Sequence[str]) -> Node | None:
    """The schema's key at `path`; a key inside a free table (team, options) gives the table itself; None if unknown.

    Example: find(["policies", "main", "lr"]).key == "policies.NAME.lr"
    """
    node = ROOT
    for part in path:
        if node.any_below:
            return node
        below = node.child(part)
        if below is None:
            return None
        node = below
    return node


def suggest(path: Sequence[str]) -> str:
    """What an unknown key was probably meant to be, as the end of an error message."""
    last = path[-1]
    if last in ALIASES:
        return f"here this is {' and '.join(ALIASES[last])}"
    keys = [node.key for node in ROOT.walk() if node.path]
    elsewhere = [key for key in keys if key.rpartition(".")[2] == last]
    if elsewhere:
        close = get_close_matches(".".join(path), elsewhere, n=1, cutoff=0.7) or elsewhere[:3]
        return f"the nearest valid key is {' or '.join(close)}"
    parent = find(path[:-1])
    siblings = list(parent.children) if parent else []
    if close := get_close_matches(last, siblings, n=1, cutoff=0.55):
        return f"the nearest valid key is {'.'.join([*path[:-1], close[0]])}"
    if close := get_close_matches(".".join(path), keys, n=1, cutoff=0.5):
        return f"the nearest valid key is {close[0]}"
    where = ".".join(path[:-1]) or "the top level"
    return f"{where} takes {', '.join(siblings) or 'no keys'}"


def describe(key: str) -> str:
    """`key` explained: type, default, help; for a section, its keys one per line. ConfigError with a suggestion if unknown.

    Where `type` picks a section's shape, its keys stand under the shape that has them.
    """
    path = key.replace("-", "_").split(".")
    node = find(path)
    if node is None:
        raise ConfigError(f"{key}: unknown key; {suggest(path)}")
    if node.any_below and len(path) > len(node.path):
        return f"{key}: belongs to {node.key}, which takes any key here; {node.help}"
    return "\n".join([*_same_key(node), *_below(node, "  ")])


def _below(node: Node, indent: str) -> list[str]:
    """The keys of a section, one a line; those of a named section of a table with it."""
    if node.variants:
        lines = [indent + _summary(node.children["type"])]
        for shape, own in node.variants.items():
            lines.append(f"{indent}{shape}: {node.shapes[shape]}")
            lines += [f"{indent}  {_summary(child)}" for name, child in own.items() if name != "type"]
        return lines
    lines = []
    for name, child in node.children.items():
        lines.append(indent + _summary(child))
        if name == NAME and child.is_section:
            lines += _below(child, indent + "  ")
    return lines


def _same_key(node: Node) -> list[str]:
    """What `node` is; a line for each different meaning where the shapes of its section share the name."""
    section = find(node.path[:-1])
    owners: dict[str, list[str]] = {}
    for shape, own in section.variants.items() if section and node.path[-1:] != ("type",) else ():
        if node.path[-1] in own:
            owners.setdefault(_summary(own[node.path[-1]]), []).append(shape)
    if len(owners) < 2:
        return list(owners) or [_summary(node)]
    return [f"{section.key}.type {', '.join(shapes)}: {line}" for line, shapes in owners.items()]


def _summary(node: Node) -> str:
    if node.is_section or node.path[-1:] == (NAME,):
        about = node.type
    else:
        about = f"{node.type}; {'required' if node.required else f'default {_shown(node.default)}'}"
    return f"{node.key}: {about}" + (f". {node.help}" if node.help else "")


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
