"""The frozen model that a KL term measures from: loaded once, shared by all policies that name the same one on the same layout.

Under LoRA there is none of these: the base is the reference, and costs nothing. Called by the runtime, which hands it to the
trainers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from drmas.config.schema import PolicyConfig
from drmas.core.flops import token_cost
from drmas.policy import mcore_fixes
from drmas.policy.architecture import read_architecture
from drmas.policy.convert import load_hf
from drmas.policy.groups import PolicyGroups
from drmas.policy.head import Head
from drmas.policy.megatron_config import policy_stack, transformer_config
from drmas.policy.model import build_model
from drmas.policy.passes import Passes
from drmas.policy.rng import PolicyRng
from drmas.policy.scorer import Scorer
from drmas.types import Row


class Reference:
    """A model without gradients and without an optimiser. Every method is collective over the ranks of `layout`.

    Example: Reference("main", config, model_path=folder, layout=Groups().layout())
    """

    def __init__(self, name: str, config: PolicyConfig, *, model_path: Path, layout: PolicyGroups) -> None:
        """ModelError: the folder's model can't be built here or doesn't fit the layout."""
        mcore_fixes.apply()
        self.architecture = read_architecture(Path(model_path))
        self.architecture.check_layout(config, policy=name)
        self.groups, self.rng = layout, PolicyRng(0, tp_rank=layout.tp.rank())
        stack = policy_stack(name, config, replicas=layout.dp_cp.size())
        with self._active():
            settings = transformer_config(self.architecture, config, layout, stack)
            model = build_model(self.architecture, settings, layout, stack)
            load_hf(model, self.architecture, Path(model_path), groups=layout)
        model.requires_grad_(False)
        passes = Passes(model, layout, config, stack, token_cost(self.architecture.shape))
        self._scorer = Scorer(passes, Head(model, self.architecture, layout))

    def logprobs(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[list[float]]:
        """The log-prob of every response token of every row at the rows' temperatures; the same on every rank."""
        with self._active():
            return self._scorer.logprobs(rows, temperatures)

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        with self.groups.active(), self.rng.lent():
            yield
