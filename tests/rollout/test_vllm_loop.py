"""The engine loop over a stand-in engine: what it holds, admits, refuses and reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest

from drmas.rollout.vllm_loop import EngineLoop


class FakeEngine:
    """Finishes a request after as many steps as its prompt has tokens. `whole` is what its workers say about their weights,
    `troubles` what they say instead."""

    def __init__(self) -> None:
        self.steps_left: dict[str, int] = {}
        self.admitted: list[list[int]] = []
        self.adapters: list[LoRARequest | None] = []
        self.calls: list[str] = []
        self.whole = [True]
        self.troubles: list[str] = []
        self.version = ""

    def add_request(self, number, prompt, params, lora_request):
        if params.max_tokens == 13:
            raise ValueError("thirteen")
        self.adapters.append(lora_request)
        self.admitted.append(prompt["prompt_token_ids"])
        self.steps_left[number] = len(prompt["prompt_token_ids"])

    def has_unfinished_requests(self):
        return bool(self.steps_left)

    def abort_request(self, numbers):
        for number in numbers:
            self.steps_left.pop(number, None)

    def step(self):
        self.steps_left = {number: left - 1 for number, left in self.steps_left.items()}
        done = [number for number, left in self.steps_left.items() if left == 0]
        self.abort_request(done)
        spans = [SimpleNamespace(version=self.version, start=0, end=1), SimpleNamespace(version="8", start=1, end=2)]
        completion = SimpleNamespace(
            token_ids=(4, 5), logprobs=SimpleNamespace(logprobs=[-0.5, -0.25]), weight_versions=spans, finish_reason="stop"
        )
        return [SimpleNamespace(finished=True, request_id=number, outputs=[completion], num_cached_tokens=0) for number in done]

    def reset_prefix_cache(self, reset_running_requests):
        self.calls.append("reset")
        return reset_running_requests

    def collective_rpc(self, answered, args):
        assert answered == "answered"  # a worker that raises leaves the others' answers unread
        method, _ = args
        self.calls.append(method)
        return [(None, trouble) for trouble in self.troubles] or [(each, "") for each in self.whole]

    def sleep(self, level, mode):
        self.calls.append(f"sleep {level} {mode}")

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")

    def set_weight_version(self, version):
        self.version = version

    def get_weight_version(self):
        return self.version


class FakeChannel:
    """Gives out scripted messages; ends the loop when there are no more."""

    def __init__(self, messages):
        self.messages, self.sent = [*messages, {"do": "shutdown"}], []

    def receive(self):
        return self.messages.pop(0)

    def waiting(self):
        return iter(())

    def send(self, message):
        self.sent.append(message)


def request(number: int, key: str, length: int, max_tokens: int = 4) -> dict:
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "top_p": 1.0, "stop": [], "seed": 1}
    return {"do": "generate", "id": number, "key": key, "prompt": [number] * length, **sampling}


def run(messages, *, deterministic=True, adapter=None):
    engine, channel = FakeEngine(), FakeChannel(messages)
    EngineLoop(engine, channel, deterministic=deterministic, version=7, adapter=adapter).run()
    return engine, channel.sent


def control(number: int, do: str, *arguments) -> dict:
    return {"do": do, "id": number, "arguments": list(arguments)}


def test_I9_held_requests_are_admitted_in_key_order_and_the_advance_ends_with_the_first_that_is_done():
    engine, sent = run([request(1, "b", 3), request(2, "c", 2), request(3, "a", 2), {"do": "advance", "id": 9}])
    assert engine.admitted == [[3, 3], [1, 1, 1], [2, 2]]
    (message,) = sent
    assert [answer["id"] for answer in message["answers"]] == [3, 2, 9]
    assert message["answers"][-1]["result"] == ["a", "c"]
    assert engine.steps_left == {"1": 1}


def test_outside_deterministic_mode_requests_run_at_once():
    _, sent = run([request(1, "b", 3), request(2, "a", 1)], deterministic=False)
    assert [[answer["id"] for answer in message["answers"]] for message in sent] == [[1], [2]]


def test_I2_spans_become_one_version_per_token():
    _, sent = run([request(1, "a", 1), {"do": "advance", "id": 2}])
    assert sent[0]["answers"][0]["result"]["versions"] == [7, 8]


def test_a_request_that_vllm_refuses_is_answered_and_ends_the_advance():
    engine, sent = run([request(1, "a", 2), request(2, "b", 2, max_tokens=13), {"do": "advance", "id": 3}])
    assert sent[0]["answers"] == [{"id": 2, "error": "thirteen"}, {"id": 3, "result": ["b"]}]
    assert engine.steps_left == {"1": 2}


def test_an_advance_over_nothing_or_over_dropped_requests_reports_nothing():
    dropped = [request(1, "a", 2), {"do": "abort", "request": 1}]
    _, sent = run([{"do": "advance", "id": 5}, *dropped, {"do": "advance", "id": 6}])
    assert sent == [{"answers": [{"id": 5, "result": []}]}, {"answers": [{"id": 6, "result": []}]}]


def test_an_advance_that_was_given_up_leaves_its_requests_for_the_next():
    messages = [control(1, "pause"), request(2, "a", 1), {"do": "advance", "id": 3}, {"do": "abort", "request": 3}]
    _, sent = run([*messages, control(4, "resume"), {"do": "advance", "id": 5}])
    assert [answer["id"] for answer in sent[-1]["answers"]] == [2, 5]
    assert len(sent) == 3


def test_trap_2_and_4_updates_need_a_pause_and_half_loaded_weights_stay_paused():
    messages = [
        control(1, "start_weight_update"),
        control(2, "pause"),
        control(3, "start_weight_update"),
        control(4, "resume"),
        control(5, "finish_weight_update", "8"),
        control(6, "get_weight_version"),
        control(7, "resume"),
    ]
    engine, sent = run(messages)
    errors = {message["id"]: message["error"] for message in sent if "error" in message}
    assert set(errors) == {1, 4}
    assert "pause it first" in errors[1]
    assert "during a weight update" in errors[4]
    assert sent[5]["result"] == "8"
    assert engine.calls == ["reset", "start_weight_update", "finish_weight_update"]


@pytest.mark.parametrize("whole", [[True, True], [True, False]])
def test_trap_4_after_an_abort_only_whole_weights_may_run(whole):
    engine, channel = FakeEngine(), FakeChannel([])
    engine.whole = whole
    channel.messages = [
        control(1, "pause"),
        control(2, "start_weight_update"),
        control(3, "abort_weight_update"),
        control(4, "resume"),
        control(5, "pause"),
        control(6, "start_weight_update"),
        control(7, "finish_weight_update", "9"),
        control(8, "resume"),
        {"do": "shutdown"},
    ]
    EngineLoop(engine, channel, deterministic=True, version=7).run()
    assert channel.sent[2] == {"id": 3, "result": all(whole)}
    assert ("error" in channel.sent[3]) == (not all(whole))
    assert "error" not in channel.sent[7]


def test_asleep_nothing_steps_and_an_update_needs_the_weights_awake():
    messages = [
        request(1, "a", 1),
        control(2, "sleep"),
        control(3, "sleep"),  # harmless
        control(4, "pause"),
        control(5, "start_weight_update"),
        control(6, "wake", False),
        control(7, "start_weight_update"),
        control(8, "sleep"),
        control(9, "finish_weight_update", "8"),
        control(10, "resume"),
        control(11, "wake", True),
        control(12, "wake", True),
    ]
    for deterministic, more in ((True, [{"do": "advance", "id": 13}]), (False, [request(14, "b", 1)])):
        engine, sent = run(
            [*messages[1:], messages[0], *more] if deterministic else [*messages[1:], *more], deterministic=deterministic
        )
        errors = {message["id"]: message["error"] for message in sent if "error" in message}
        assert errors.keys() == {5, 8}
        assert "sleeps; wake its weights first" in errors[5]
        assert "sleep during a weight update" in errors[8]
        assert [call for call in engine.calls if call.startswith(("sleep", "wake", "start"))] == [
            "sleep 1 keep",
            "wake weights",
            "start_weight_update",
            "wake kv_cache",
        ]
        assert sent[-1]["answers"][0]["result"]["versions"] == [8, 8]


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ([control(3, "wake", False)], {"1": 2}),
        ([control(3, "wake", True)], {}),
        ([control(3, "pause"), control(4, "wake", True)], {"1": 2}),
        ([control(3, "pause"), control(4, "wake", True), control(5, "resume")], {}),
    ],
)
def test_what_it_has_waits_until_it_is_awake_and_a_pause_is_another_thing(more, left):
    engine, _ = run([control(2, "sleep"), request(1, "a", 2), *more], deterministic=False)
    assert engine.steps_left == left


def test_adapters_keep_one_number_and_a_name_of_their_version():
    update = [
        control(2, "pause"),
        control(3, "start_weight_update"),
        control(4, "finish_weight_update", "8"),
        control(5, "resume"),
    ]
    messages = [request(1, "a", 1), {"do": "advance", "id": 6}, *update, request(7, "b", 1), {"do": "advance", "id": 8}]
    engine, _ = run(messages, adapter={"r": 4})
    assert engine.calls == ["open_adapters", "reset", "start_weight_update", "finish_weight_update", "install_adapter"]
    assert [(each.lora_int_id, each.lora_name) for each in engine.adapters] == [(1, "version 7"), (1, "version 8")]
    engine, _ = run(messages)
    assert engine.adapters == [None, None]


def test_workers_answer_with_their_errors_and_each_is_reported_once():
    engine, channel = FakeEngine(), FakeChannel([control(2, "update_weights", {}), control(3, "get_weight_version")])
    loop = EngineLoop(engine, channel, deterministic=True, version=7)
    engine.troubles = ["Refused: worker 1: é", "Refused: worker 1: é", "ValueError: no room"]
    loop.run()
    assert channel.sent == [{"id": 2, "error": "Refused: worker 1: é; ValueError: no room"}, {"id": 3, "result": "7"}]
