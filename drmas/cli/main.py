"""The `drmas` command. Each command imports what it needs when it runs, so that `--help` answers at once.

A user's mistake (`UserError`) is one message on stderr and exit status 2; Ctrl-C is 130; a lost rank or host is 75
(`runtime.watch`: start the job again); anything else is a fault of ours and shows its traceback. Under torchrun, ranks other
than 0 name themselves in the message.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from drmas.errors import ConfigError, UserError

app = typer.Typer(
    name="drmas",
    help="Reinforcement learning for teams of LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show a configuration, or explain a key of it.", no_args_is_help=True)
app.add_typer(config_app, name="config")

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Unknown options are configuration keys; `drmas.config.load` checks them."""

Recipe = Annotated[str | None, typer.Argument(metavar="RECIPE", help="A packaged recipe, or a .toml, .yaml or .json file.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


@app.command(context_settings=OVERRIDES)
def train(
    ctx: typer.Context,
    recipe: Recipe = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print placement, batch arithmetic and backends, then stop.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="With --dry-run: of a job of so many trainer ranks (train.ranks).")
    ] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option("--gpus-per-host", min=1, help="With --dry-run: of hosts with so many GPUs.")
    ] = None,
    gpu_memory_gib: Annotated[
        float | None, typer.Option("--gpu-memory-gib", min=1, help="With --dry-run: of GPUs with so much memory, such as 79.6.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run that is in the folder, and start anew.")
    ] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Go on from the newest checkpoint if the folder holds a run, else start.")
    ] = False,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Trace steps, such as steps=3-5: profile/trace.json opens in Perfetto.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the packaged recipes.")] = False,
) -> None:
    """Train a team. Any key of the configuration is an option: --train.steps 5 --policies.main.lr 1e-5"""
    from drmas.config.load import load, recipes

    if list_:
        for name, about in recipes().items():
            print(f"{name}\n    {about}")
        return
    name, overrides = _words(ctx, recipe, "RECIPE")
    if ranks is not None and not dry_run:
        raise ConfigError(f"--ranks {ranks} is of --dry-run; a start has as many as launchers/torchrun/single_node.sh starts")
    if (gpus_per_host, gpu_memory_gib) != (None, None) and not dry_run:
        raise ConfigError("--gpus-per-host and --gpu-memory-gib are of --dry-run; a start looks at the machine that it is on")
    overrides += ["--telemetry.profile", profile] if profile else []
    overrides += ["--train.ranks", str(ranks)] if ranks else []
    config = load(name, overrides)

    # Trainer and engine share the cores: threads that spin while they wait would take them from each other. Read by the OpenMP
    # runtime when torch loads it, so it must be set before that.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")

    from drmas.runtime.run import train as run

    hosts = {"gpus_per_host": gpus_per_host, "gpu_memory_gib": gpu_memory_gib}
    run(config, resume=resume, overwrite=overwrite, auto_resume=auto_resume, dry_run=dry_run, **hosts)


@app.command("eval", context_settings=OVERRIDES)
def eval_(
    ctx: typer.Context,
    source: Annotated[str | None, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe, or a run's folder.")] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="POLICY=FOLDER", help="Evaluate this Hugging Face folder instead.")
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", help="The step of a run's checkpoint; its newest weights if unset.")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Episodes per task (eval.samples).")] = None,
    ablate: Annotated[
        list[str] | None,
        typer.Option("--ablate", metavar="AGENT", help="Evaluate again with this agent on its base model; all: one by one."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Where the results go; RUN/eval/..., or OUTPUT/NAME-eval of a recipe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Measure a team without training: avg@n, pass@k, cost, what each agent's training is worth. --eval.KEY VALUE sets more."""
    from drmas.config.load import split_words

    plain, overrides = split_words([word for word in (source, *ctx.args) if word is not None])
    if len(plain) != 1:
        raise ConfigError(f"eval: expected one RECIPE or RUN, found {' '.join(plain) or 'none'}")
    overrides += ["--eval.samples", str(samples)] if samples is not None else []
    overrides += ["--eval.ablate", json.dumps(ablate)] if ablate else []

    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in train: the engines have the cores
    os.environ.setdefault("GOMP_SPINCOUNT", "0")

    from drmas.cli.evaluate import run_eval

    run_eval(plain[0], overrides, models=model or [], checkpoint=checkpoint, output=output, as_json=as_json)


@app.command(context_settings=OVERRIDES)
def inspect(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's folder, with --step.")] = None,
    rows: Annotated[
        Path | None, typer.Option("--rows", help="A JSONL file of rows: task, episode, agent, turn, reward, ...")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Which step of the run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show which rows are compared with each other, and each row's advantage. --advantage.KEY VALUE changes the rule."""
    from drmas.config.load import split_words

    plain, overrides = split_words([word for word in (run, *ctx.args) if word is not None])
    if (rows is None) == (not plain) or len(plain) > 1:
        raise ConfigError("inspect: expected either --rows FILE.jsonl, or RUN with --step N")
    if rows is None and step is None:
        raise ConfigError(f"inspect: --step is missing; expected which step of {plain[0]} to show")

    from drmas.cli.inspect import doubts, inspect_rows, inspect_run, read_rows

    if rows is not None:
        found = read_rows(rows)
        print(inspect_rows(found, overrides, as_json=as_json))
        for doubt in doubts(found):
            print(f"drmas: {rows}: {doubt}", file=sys.stderr)
    else:
        print(inspect_run(Path(plain[0]), step, overrides, as_json=as_json))


@app.command()
def report(run: Run) -> None:
    """Write a run's report.html anew and print its path."""
    from drmas.telemetry.report import write_report

    print(write_report(run))


@app.command()
def export(
    run: Run,
    step: Annotated[int | None, typer.Option("--step", help="Of which checkpoint; the newest if unset.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="One policy only.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="A folder per policy goes there, or the one that is named; RUN/export/step_N if unset."),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapters alone, as PEFT's folder.")] = False,
) -> None:
    """Write the policies of a checkpoint as Hugging Face folders and print where they are."""
    from drmas.cli.weights import export_run

    for name, folder in export_run(run, step=step, policy=policy, output=output, adapter=adapter).items():
        print(f"{name}: {folder}")


@app.command("import")
def import_(
    run: Run,
    policy: Annotated[str, typer.Option("--policy", help="Which policy gets the weights.")],
    model: Annotated[Path, typer.Option("--model", help="A Hugging Face folder of the policy's architecture.")],
) -> None:
    """Put a model's weights into a run's newest checkpoint, in place; drmas train --resume goes on, with moments anew."""
    from drmas.cli.weights import import_model

    step, version = import_model(run, policy=policy, model=model)
    print(f"{policy} at step {step} is {model} now, as version {version}")


@config_app.command("show", context_settings=OVERRIDES)
def config_show(ctx: typer.Context, recipe: Recipe = None) -> None:
    """Print every value of a recipe with overrides, as JSON."""
    from drmas.agents.team import check_policies, check_tools, load_team
    from drmas.config.load import dump, load

    config = load(*_words(ctx, recipe, "RECIPE"))
    team = load_team(config.team)
    check_policies(team, [*config.policies, *config.remotes])
    check_tools(team, config.tools)
    print(dump(config), end="")


@config_app.command("explain")
def config_explain(key: Annotated[str, typer.Argument(metavar="KEY", help="For example loss.clip_low, or loss.")]) -> None:
    """Print a key's type, default and meaning; for a section, all its keys."""
    from drmas.config.keys import describe

    print(describe(key))


@app.command("prepare-data")
def prepare_data(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="facts, math, search, or one set of --list.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="The folder of its files; data/NAME if unset.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List what can be prepared.")] = False,
) -> None:
    """Fetch a public data set, or write the packaged facts, as JSONL files for data.type jsonl."""
    from drmas.cli.data import describe_sets, prepare

    if list_:
        print(describe_sets())
        return
    if name is None:
        raise ConfigError("prepare-data: expected the NAME of a data set; drmas prepare-data --list shows them")
    for path, count in prepare(name, output):
        print(f"{path}: {count} lines")


@app.command()
def reproduce(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and steps: minutes instead of hours.")] = False,
    output: Annotated[Path, typer.Option("--output", help="The folder of all trials and of the report.")] = Path(
        "runs/reproduce"
    ),
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Trials at a time, of one thread each; as many as cores if unset.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="TEXT", help="Only trials such as maths-shared/grpo/seed-0 with TEXT.")
    ] = None,
    retry_crashed: Annotated[bool, typer.Option("--retry-crashed", help="Run those that crashed again.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the reproduction that is in the folder, and start anew.")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Run nothing; write the report of what is there.")] = False,
) -> None:
    """Try the method's claim: train tiny teams with each estimator and write one report. A second call goes on."""
    if report_only and (retry_crashed or overwrite or only):
        raise ConfigError("--report-only runs nothing; give it without --retry-crashed, --overwrite and --only")

    from drmas.cli.reproduce import report_reproduction, run_reproduction

    if report_only:
        report_reproduction(output)
        return
    raise typer.Exit(
        run_reproduction(output, quick=quick, jobs=jobs, only=only, retry_crashed=retry_crashed, overwrite=overwrite)
    )


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False) -> None:
    """What is installed here, which backend each part takes and why. Exit status 1 if no run can start."""
    from drmas.cli.doctor import diagnose, render, render_json

    diagnosis = diagnose()
    print(render_json(diagnosis) if as_json else render(diagnosis))
    raise typer.Exit(0 if diagnosis.ready else 1)


@app.command(context_settings=OVERRIDES)
def plan(
    ctx: typer.Context,
    recipe: Recipe = None,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME|FILE", help="A packaged description, or a .toml file.")
    ] = "h100-8",
    gpus: Annotated[int | None, typer.Option("--gpus", help="So many of its devices instead; whole nodes beyond one.")] = None,
    price: Annotated[float | None, typer.Option("--price", help="Per device and hour.")] = None,
    calls: Annotated[str, typer.Option("--calls", metavar="N|AGENT=N,...", help="Calls per episode.")] = "",
    prompt: Annotated[str, typer.Option("--prompt", metavar="N|AGENT=N,...", help="Tokens of a call's prompt.")] = "",
    response: Annotated[str, typer.Option("--response", metavar="N|AGENT=N,...", help="Mean tokens of a response.")] = "",
    spread: Annotated[float | None, typer.Option("--spread", help="Deviation of the logarithm of response lengths.")] = None,
    workload: Annotated[
        Path | None,
        typer.Option("--workload", metavar="FILE|RUN", help="All of these: a file with a table workload, or a run's folder."),
    ] = None,
    growth: Annotated[
        int | None, typer.Option("--growth", metavar="N", help="Not a plan: what a step takes on 1, 2, 4, ... N GPUs.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", metavar="FILE", help="Measure this machine, and write its description there.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="SPEC", help="With --calibrate: the model to measure with.")
    ] = "packaged:smollm2-135m-instruct",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--dtype", help="With --calibrate: of trainer and engine.")
    ] = "float32",
    published: Annotated[bool, typer.Option("--published", help="Predict what others measured, and show the errors.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the packaged cluster descriptions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Also write plan.json and plan.html there.")] = None,
) -> None:
    """What a run needs and takes on a cluster: memory, seconds, cost, better layouts. Nothing is fetched, nothing starts; but
    --calibrate starts an engine and a trainer for some minutes."""
    if calibrate is not None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as for a run
        os.environ.setdefault("GOMP_SPINCOUNT", "0")
        from drmas.planning.calibration import calibrate as measure

        measure(calibrate, model, dtype=dtype, note=print)
        return
    from drmas.cli import plan as command

    if list_:
        print(command.render_clusters(), end="")
        return
    if published:
        print(command.run_published(as_json=as_json), end="")
        return
    name, overrides = _words(ctx, recipe, "RECIPE")
    lengths = {"calls": calls, "prompt": prompt, "response": response, "spread": spread, "work": workload}
    where = {"cluster": cluster, "gpus": gpus, "price": price}
    print(command.run_plan(name, overrides, **where, **lengths, growth=growth, output=output, as_json=as_json), end="")


@app.command("serve-retriever")
def serve_retriever(
    corpus: Annotated[str, typer.Option("--corpus", help="facts, or a JSONL file of passages with contents.")] = "facts",
    index: Annotated[Literal["bm25", "dense"], typer.Option("--index", help="By words or by vectors.")] = "bm25",
    encoder: Annotated[
        str, typer.Option("--encoder", help="Of a dense index: the packaged one, or a Hugging Face folder.")
    ] = "packaged:all-minilm-l6-v2",
    faiss: Annotated[
        Path | None, typer.Option("--faiss", help="A FAISS file with the passages' vectors, such as Search-R1's e5_Flat.index.")
    ] = None,
    index_folder: Annotated[
        Path | None, typer.Option("--index-folder", help="Keep the built index there, and read it from there the next time.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Nobody is asked for a password; the default is this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    topk_limit: Annotated[int, typer.Option("--topk-limit", min=1, help="Most passages that a request may ask for.")] = 100,
    deadline_seconds: Annotated[
        float, typer.Option("--deadline-seconds", min=0.001, help="Of a request; past it the answer is 503.")
    ] = 10.0,
    cache_size: Annotated[int, typer.Option("--cache-size", min=0, help="Answers that are kept.")] = 10000,
) -> None:
    """Serve a corpus to the search tool of runs: POST /retrieve, GET /health. Ctrl-C ends it."""
    from drmas.cli.retriever import serve_retriever as serve
    from drmas.envs.search.server import Limits

    limits = Limits(topk=topk_limit, deadline_seconds=deadline_seconds, cache_size=cache_size)
    serve(
        corpus=corpus,
        index=index,
        encoder=encoder,
        faiss=faiss,
        folder=index_folder,
        host=host,
        port=port,
        limits=limits,
    )


@app.command("serve-engines")
def serve_engines(
    host: Annotated[str, typer.Option("--host", help="The address of this machine that trainers see.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8200,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="Those that engines may have, such as 0-3,6; all if unset.")
    ] = None,
    logs: Annotated[Path, typer.Option("--logs", help="The folder of the engines' logs.")] = Path("engine-logs"),
    token_env: Annotated[
        str, typer.Option("--token-env", help="The environment variable that holds the secret (cluster.token_env).")
    ] = "DRMAS_ENGINE_TOKEN",
) -> None:
    """Let trainers on other machines run their engines here (cluster.engine_hosts). Ctrl-C ends it and all engines."""
    from drmas.cli.serve_engines import serve_engines as serve

    serve(host=host, port=port, gpus=gpus, logs=logs, token_env=token_env)


@app.command(context_settings=OVERRIDES)
def launch(
    ctx: typer.Context,
    target: Annotated[
        Literal["local", "torchrun", "slurm", "kubernetes"],
        typer.Argument(metavar="TARGET", help="With what to start the job."),
    ],
    recipe: Recipe = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Hosts with trainer ranks.")] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", min=1, help="Trainer ranks on each; train.ranks, or one per GPU, if unset."),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=0, help="As the launcher's file has it, or this machine, if unset.")
    ] = None,
    engine_nodes: Annotated[
        int, typer.Option("--engine-nodes", min=0, help="slurm, kubernetes: further hosts, for engines alone.")
    ] = 0,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", metavar="HOST:PORT", help="torchrun: where the nodes meet, one of them.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option("--node-rank", min=0, help="torchrun: which node this is.")] = None,
    image: Annotated[str | None, typer.Option("--image", help="kubernetes: another image than the manifest's.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="kubernetes: another one than kubectl's own.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="local, torchrun: as drmas train has it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="local, torchrun: as drmas train has it.")] = False,
    auto_resume: Annotated[bool, typer.Option("--auto-resume", help="local, torchrun: as drmas train has it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run on which host, and start nothing.")] = False,
) -> None:
    """Check a job, and start it with the files of launchers/. Any key of the configuration is an option."""
    name, overrides = _words(ctx, recipe, "RECIPE")

    from drmas.cli.launch import launch as start
    from drmas.cli.launch_plans import Options

    given = {"--resume": resume, "--overwrite": overwrite, "--auto-resume": auto_resume}
    options = Options(nodes, ranks_per_node, gpus_per_node, engine_nodes, rendezvous, node_rank, image, namespace)
    raise typer.Exit(start(target, name, overrides, [flag for flag in given if given[flag]], options, dry_run=dry_run))


def _words(ctx: typer.Context, first: str | None, what: str) -> tuple[str, list[str]]:
    """The command's one plain word, wherever it stands among the overrides, and the overrides."""
    from drmas.config.load import split_words

    plain, overrides = split_words([word for word in (first, *ctx.args) if word is not None])
    if len(plain) != 1:
        raise ConfigError(f"expected one {what}, found {' '.join(plain) or 'none'}; drmas train --list shows the recipes")
    return plain[0], overrides


def main() -> None:
    """Entry point of `drmas` and of `python -m drmas.cli`."""
    try:
        app()
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(f"drmas: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)
        sys.exit(2)
