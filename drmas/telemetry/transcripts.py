"""A few episodes as HTML: each turn with its prompt, text, advantage and segment; failed episodes shown as failed.

Called by the report. Which episodes: of up to `STEPS` steps spread over the run, the ones that tell most (a failed one, the
best, the worst), then the first ones. Those of probes aren't shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drmas.telemetry.episodes import read_episodes, steps_with_episodes
from drmas.telemetry.markup import shortened, text

STEPS = 5
"""Steps shown, first and last included: the page must stay small for a run of thousands."""
CHARACTERS = 6000
"""Of a prompt or response."""

Record = dict[str, Any]


def transcripts(run_dir: Path, per_step: int) -> str:
    """HTML of the chosen steps' episodes, newest step first; a damaged file is named instead of ending the report."""
    parts = []
    for position, step in enumerate(reversed(spread(steps_with_episodes(run_dir), STEPS))):
        try:
            episodes = [episode for episode in read_episodes(run_dir, step) if episode.get("probe") is None]
            chosen = pick(episodes, per_step)
            body = "".join(_episode(episode) for episode in chosen)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            body = f'<p class="bad">These episodes can\'t be shown: {text(error)}</p>'
        opened = " open" if position == 0 else ""
        parts.append(f'<details class="step"{opened}><summary>Step {step}</summary>{body}</details>')
    return "".join(parts)


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Up to `count` of `steps`, evenly, the first and the last among them.

    Example: spread([1, 2, 3, 4, 5, 6, 7], 3) == [1, 4, 7]
    """
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def pick(episodes: Sequence[Record], count: int) -> list[Record]:
    """A failed episode, the best, the worst, then the first ones: up to `count`, in file order."""
    finished = [i for i, episode in enumerate(episodes) if episode["reward"] is not None]
    wanted = [i for i, episode in enumerate(episodes) if episode["status"] != "ok"][:1]
    if finished:
        wanted.append(max(finished, key=lambda i: (episodes[i]["reward"], -i)))
        wanted.append(min(finished, key=lambda i: (episodes[i]["reward"], i)))
    chosen = list(dict.fromkeys([*wanted, *range(len(episodes))]))[:count]
    return [episodes[i] for i in sorted(chosen)]


def _episode(episode: Record) -> str:
    if episode["status"] == "ok":
        outcome = f'<span class="tag">reward {_number(episode["reward"])}</span>'
        message = ""
    else:
        outcome = f'<span class="tag bad">failed: {text(episode["status"])}</span>'
        message = f'<p class="bad">No reward, and out of every statistic: {text(episode["message"] or "no message")}</p>'
    head = f'<h3>{text(episode["episode"])} {outcome}</h3><p class="soft">{_answers(episode)}</p>'
    question = f'<p class="question">{text(shortened(episode["question"], CHARACTERS))}</p>'
    turns = "".join(_turn(turn) + _tools(episode["tools"], turn["turn"]) for turn in episode["turns"])
    return f"<article>{head}{question}{message}{_tools(episode['tools'], None)}{turns}</article>"


def _tools(uses: Sequence[Record], turn: int | None) -> str:
    """The tool calls that `turn` asked for; with None, those of the team itself."""
    parts = []
    for use in uses:
        if use["turn"] == turn:
            outcome = "" if use["ok"] else ' <span class="tag bad">an error</span>'
            call = f"{text(use['tool'])} {text(shortened(use['arguments'], 200))}{outcome}"
            result = text(shortened(use["result"], CHARACTERS))
            parts.append(f"<details><summary>{call}</summary><pre>{result}</pre></details>")
    return "".join(parts)


def _answers(episode: Record) -> str:
    answer = "no answer" if episode["answer"] is None else f"answer <b>{text(shortened(episode['answer'], 200))}</b>"
    return f"truth <b>{text(shortened(episode['truth'], 200))}</b> · {answer} · {episode['seconds']:.1f} s"


def _turn(turn: Record) -> str:
    advantage = turn["advantage"]
    tags = [f'<span class="tag agent">{text(turn["agent"])}</span>']
    if advantage is None:
        tags.append('<span class="tag">no advantage</span>')
    else:
        sign = "good" if advantage > 0 else "bad" if advantage < 0 else ""
        tags.append(f'<span class="tag {sign}">advantage {advantage:+.3f}</span>')
    if turn["penalty"]:
        tags.append(f'<span class="tag bad">penalty {_number(turn["penalty"])}</span>')
    if not turn["valid"]:
        tags.append('<span class="tag bad">did not parse</span>')
    if turn["status"] == "stale":
        tags.append('<span class="tag bad">too stale</span>')
    if not turn["trained"]:
        tags.append('<span class="tag">frozen</span>')
    if turn["finish_reason"] == "length":
        tags.append('<span class="tag bad">cut at the length limit</span>')
    facts = [
        f"policy {text(turn['policy'])}",
        f"{len(turn['prompt_ids'])} + {len(turn['response_ids'])} tokens",
        f"version {_versions(turn['versions'])}",
        f"compared within {_segments(turn['segments'])}",
    ]
    prompt = text(shortened(turn["prompt"], CHARACTERS))
    response = text(shortened(turn["text"], CHARACTERS)) or '<span class="soft">(empty)</span>'
    return (
        f'<div class="turn"><p class="tags">{"".join(tags)}</p><p class="soft">{" · ".join(facts)}</p>'
        f"<details><summary>prompt</summary><pre>{prompt}</pre></details><pre>{response}</pre></div>"
    )


def _versions(versions: Sequence[int]) -> str:
    seen = sorted(set(versions))
    return "-" if not seen else str(seen[0]) if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"


def _segments(segments: dict[str, list[Any] | None]) -> str:
    names = {scope: " / ".join(map(str, key)) for scope, key in segments.items() if key is not None}
    if not names:
        return "nothing"
    if len(set(names.values())) == 1:
        return text(next(iter(names.values())))
    return text(", ".join(f"{scope}: {name}" for scope, name in names.items()))


def _number(value: float) -> str:
    return f"{value:.4g}"
