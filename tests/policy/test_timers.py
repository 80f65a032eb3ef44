"""Megatron's own schedule, timed by spans."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.transformer_config import TransformerConfig

from drmas.policy.timers import SpanTimers
from drmas.telemetry import perfetto, trace


class Alone:
    """A process group of this rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class Line(torch.nn.Linear):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(2, 2)
        self.config, self.model_type = config, ModelType.encoder_or_decoder

    def set_input_tensor(self, tensors) -> None:
        pass


@pytest.fixture
def run():
    config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1, calculate_per_token_loss=True)
    config.timers = SpanTimers()
    model = Line(config)
    groups = SimpleNamespace(**dict.fromkeys(("tp", "cp", "pp", "embd", "pos_embd", "dp_cp", "tp_cp", "tp_dp_cp"), Alone()))

    def forward(iterator, model):
        with trace.span("pack"):
            batch = next(iterator)
        count = torch.zeros((), dtype=torch.int32)
        return model(batch), lambda output: (output.square().sum(), count, None)

    def schedule(batches, **settings) -> None:
        forward_backward_no_pipelining(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            pg_collection=groups,
            **settings,
        )

    return schedule


def test_each_microbatch_has_a_forward_and_a_backward_span(run, tmp_path):
    tracer = trace.Tracer(tmp_path, 0)
    batches = [torch.randn(1, 2) for _ in range(2)]
    with trace.recording(tracer), trace.span("train", policy="main"):
        run(batches)
        run(batches[:1], forward_only=True)
    spans = perfetto.read(tmp_path).spans
    names = {span.id: span.name for span in spans}
    passes = ["forward", "pack", "backward"]
    assert [span.name for span in spans] == ["train", *passes, *passes, "forward", "pack"]
    assert {(span.name, names.get(span.parent)) for span in spans} == {
        ("train", None),
        ("forward", "train"),
        ("pack", "forward"),
        ("backward", "train"),
    }
    assert {span.policy for span in spans} == {"main"}
    assert all(span.finished for span in spans)


def test_a_pass_that_failed_does_not_spoil_the_next(run, tmp_path):
    tracer = trace.Tracer(tmp_path, 0)
    with trace.recording(tracer):
        with pytest.raises(RuntimeError):
            run([torch.randn(1, 3)])  # the model takes 2 features
        run([torch.randn(1, 2)])
    spans = perfetto.read(tmp_path).spans
    assert [span.name for span in spans] == ["forward", "pack", "forward", "pack", "backward"]
    assert [span.parent for span in spans] == [None, 1, None, 3, None]


def test_without_a_trace_the_timers_do_nothing(run, tmp_path):
    run([torch.randn(1, 2)])
    assert list(tmp_path.iterdir()) == []
