"""The ``jumar`` command.

Every command prints tables for people, or one JSON document with ``--json``.  A mistake of the user is one line on
stderr that begins with the command, and exit status 2; a check that fails is exit status 1.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jumar import cli_runs
from jumar.cli_common import Json, UserError, console, print_json, split, user_errors
from jumar.train.schema import SECTIONS

app = typer.Typer(
    name="jumar",
    help="Fused Ascend operators, model converters, verification and training on any machine.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

# Typer carries its own click since 0.2x: take the class from what it exports.
_ClickException = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

def _dtypes(text: str | None) -> list[Any] | None:
    from jumar.opinfo import parse_dtype

    names = split(text)
    with user_errors(ValueError):
        return None if names is None or names == ["all"] else [parse_dtype(n) for n in names]


@app.command()
def env(json: Json = False) -> None:
    """Versions, the SIMD level in use, threads, JUMAR_* variables, operator namespaces."""
    from jumar import compat, environment

    with user_errors(compat.ShimError):
        facts = environment.collect()
    if json:
        return print_json(facts)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key in ("jumar", "python", "torch"):
        table.add_row(key, facts[key])
    for package, version in facts["packages"].items():
        if package != "torch_npu":
            table.add_row(package, version or "[dim]not installed[/dim]")
    npu = facts["packages"]["torch_npu"]
    table.add_row("torch_npu", npu or facts["torch_npu"])
    table.add_row("operators in", ", ".join(facts["namespaces"]))
    simd = facts["simd"]
    table.add_row("SIMD", f"{simd['in_use']}  (usable: {', '.join(simd['usable'])})")
    table.add_row("CPU", f"{facts['machine']}, torch uses {facts['cpu_capability']}")
    table.add_row("threads", str(facts["threads"]))
    settings = ", ".join(f"{k}={v}" for k, v in facts["variables"].items())
    table.add_row("variables", settings or "[dim]no JUMAR_* variable is set[/dim]")
    for shim in facts["shims"]:
        table.add_row(f"shim {shim['name']}", f"{shim['state']}: {shim['reason']}")
    console().print(table)


@app.command()
def ops(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One operator, in full.")
    ] = None,
    json: Json = False,
) -> None:
    """The operators: schema, formula, dtypes, error bounds, page of the documentation."""
    from jumar import opinfo
    from jumar.spelling import unknown

    schemas = opinfo.schemas()
    if name is not None and name not in schemas:
        raise UserError(unknown("operator", name, schemas))
    entries = [_operator(n, schemas[n]) for n in ([name] if name else schemas)]
    if json:
        return print_json(entries[0] if name else entries)
    out = console()
    if name is None:
        table = Table("operator", "computes", "page", header_style="bold")
        for entry in entries:
            table.add_row(entry["name"], escape(entry["formula"]), entry["doc"])
        out.print(table)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in entries[0].items():
        if isinstance(value, dict):
            value = "\n".join(f"{k}: {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        if value:
            table.add_row(key, escape(value))
    out.print(table)


def _operator(name: str, schema: str) -> dict[str, Any]:
    """One operator as plain data."""
    from jumar import opinfo

    formula, doc = opinfo.describe(name)
    entry = {"name": name, "schema": schema, "formula": formula, "doc": doc}
    info = opinfo.OPERATORS.get(name) or opinfo.forward_of(name)
    dtypes = opinfo.DTYPES if info is None else info.dtypes
    entry["dtypes"] = [opinfo.dtype_name(dtype) for dtype in dtypes]
    if info is None or info.name != name:
        return entry
    entry["shapes"] = info.shapes
    entry["gradient"] = list(info.backward)
    entry["speed asked"] = info.target.text
    entry["bounds"] = {
        opinfo.dtype_name(dtype): ", ".join(f"{k} {b.text(dtype)}" for k, b in info.bounds.items())
        for dtype in dtypes
    }
    return entry


def _load_model(model: str, **options: Any) -> Any:
    from jumar import models

    try:
        with user_errors(ValueError):
            return models.load(model, **options)
    except ModuleNotFoundError as error:
        raise UserError(f"models need more packages (the extra jumar[hf]): {error}") from error


def _job(model: str, overrides: list[str]) -> Any:
    """The job that a MODEL stands for; None for a folder or a name."""
    if model.startswith("-"):
        raise UserError(f"{model} goes with a job file (*.toml), which is missing")
    if not model.endswith(".toml"):
        if overrides:
            raise UserError(f"--{overrides[0]} goes with a job file (*.toml), and {model!r} is none")
        return None
    from jumar.train.errors import JobError
    from jumar.train.job import load

    with user_errors(JobError):
        return load(model, overrides)


def _of_job(function: str, *arguments: Any, **options: Any) -> Any:
    """What a function of :mod:`jumar.train.verification` returns."""
    from jumar.convert import ConverterError
    from jumar.train.errors import JobError

    try:
        from jumar.train import verification

        with user_errors(JobError, ConverterError):
            return getattr(verification, function)(*arguments, **options)
    except ModuleNotFoundError as error:
        raise UserError(f"jobs need more packages (the extra jumar[train]): {error}") from error


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def inspect(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a config.json, the name of a built-in model, or a job file (*.toml); its keys as [bold]--section.key=value[/bold].",
        ),
    ],
    converters: Annotated[
        str | None,
        typer.Option("--converters", help="Comma-separated names. Default: the job's, or all that apply."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail when a converter matches nothing.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="One row per module.")] = False,
    json: Json = False,
) -> None:
    """What conversion would do to a model: every site, replaced or skipped and why. Nothing is trained."""
    import jumar
    from jumar.convert import ConverterError

    names = split(converters)
    job = _job(model, _overrides(context.args))
    if job is not None:
        report = _of_job("inspect", job, names, strict=strict)
    else:
        loaded = _load_model(model)
        with user_errors(ConverterError):
            if names is None:
                report = jumar.kernelize(loaded, strict=strict)
            else:
                report = jumar.convert(loaded, names, strict=strict)
    if json:
        return print_json({"model": model, **report.to_dict()})
    console().print(report.table(full=full))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def verify(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model to verify whole: a folder, a built-in name, or a job file (*.toml); its keys as [bold]--section.key=value[/bold].",
        ),
    ] = None,
    op: Annotated[
        str | None, typer.Option("--op", help="Operators, comma-separated; default all.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="fp32, bf16, fp16, fp64, comma-separated.")
    ] = None,
    converters: Annotated[
        str | None, typer.Option("--converters", help="For a model. Default: the job's, or all that apply.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random data.")] = 0,
    json: Json = False,
) -> None:
    """Outputs and gradients of eager and fused against an fp64 oracle, in ulps. Exit status 1 when fused is worse."""
    from jumar.verify import render

    if model is not None and op is not None:
        raise UserError("give a model or --op, not both")
    if model is None and converters is not None:
        raise UserError("--converters goes with a model")
    dtypes = _dtypes(dtype)
    if model is not None:
        result = _verify_model(model, dtypes, converters, seed, _job(model, _overrides(context.args)))
    else:
        from jumar.verify import verify_operators

        with user_errors(ValueError):
            result = verify_operators(_op_names(op), dtypes, seed)
    if json:
        print_json(render.to_dict(result))
    else:
        render.show(result, console())
    if not all(row.ok for row in result):
        raise typer.Exit(1)


def _op_names(op: str | None) -> list[str] | None:
    """Names of known operators, or None for all. ValueError for an unknown one."""
    from jumar.opinfo import find

    names = split(op)
    if names is None or names == ["all"]:
        return None
    return [find(name).name for name in names]


def _verify_model(model: str, dtypes: Any, converters: str | None, seed: int, job: Any) -> Any:
    import torch

    from jumar.convert import ConverterError
    from jumar.verify import verify_model

    if job is not None:
        return [row for d in dtypes or [None] for row in _of_job("verify", job, split(converters), d, seed=seed)]
    rows = []
    for dtype in dtypes or [torch.float32, torch.bfloat16]:
        loaded = _load_model(model, seed=seed, dtype=dtype)
        with user_errors(ConverterError):
            rows += verify_model(loaded, split(converters), seed=seed)
    return rows


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(
    context: typer.Context,
    op: Annotated[str, typer.Option("--op", help="Operators, comma-separated, or all.")] = "all",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="fp32, bf16, fp16, fp64, comma-separated.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="Named shapes of the operators, comma-separated."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", help="contiguous, sliced, transposed, expanded, or all."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help="One case, OPERATOR:DTYPE:SHAPE\\[:LAYOUT], as a failure prints it; may be repeated.",
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option("--shapes", help="A file of shapes in place of the operators' own."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option("--mode", help="speed, correctness, gradient or support, over the same cases."),
    ] = "speed",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One large shape an operator and dtype, few repetitions."),
    ] = False,
    inductor: Annotated[
        bool | None,
        typer.Option(
            "--inductor/--no-inductor",
            help="Include torch.compile. Default: with operators yes, with --step no.",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            metavar="CONFIG",
            help="Whole training steps of a job file; its keys as [bold]--section.key=value[/bold].",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Counted steps of --step, a contender.")
    ] = 5,
    emulate: Annotated[
        str | None,
        typer.Option("--emulate", help="avx2: hold all contenders to this instruction set."),
    ] = None,
    csv: Annotated[str | None, typer.Option("--csv", help="Also write the rows here.")] = None,
    plot: Annotated[str | None, typer.Option("--plot", help="Also draw the result here.")] = None,
    json: Json = False,
) -> None:
    """Operators or training steps against eager and Inductor, interleaved, beside the machine's own limits.

    Results are checked first; exit status 1 when they are worse than stated.
    """
    from jumar.bench import command

    if context.args and step is None:
        raise UserError(f"No such option: {context.args[0]}{_nearest(context)}")
    with user_errors(ValueError, ImportError):
        request = command.Request(
            op=_op_names(op),
            dtypes=_dtypes(dtype),
            shape=shape,
            layout=layout,
            cases=case or [],
            shapes=shapes,
            mode=mode,
            quick=quick,
            inductor=inductor,
            emulate=emulate,
            csv=csv,
            plot=plot,
            step=step,
            steps=steps,
            overrides=_overrides(context.args),
        )
        request.check()
    progress = Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        progress.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)

    with user_errors(command.BenchError, OSError):
        outcome = request.run(say)
    if json:
        print_json(outcome.data)
    else:
        outcome.show(console())
    if not outcome.ok:
        raise typer.Exit(1)


def _nearest(context: typer.Context) -> str:
    import difflib

    known = [name for p in context.command.params for name in p.opts if name.startswith("--")]
    near = difflib.get_close_matches(context.args[0].split("=")[0], known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=f"Sections: {', '.join(SECTIONS)}. A mistaken key is answered with the nearest one; all keys: docs/training.md.",
)
def train(
    context: typer.Context,
    config_file: Annotated[
        str, typer.Option("--job.config_file", help="The job file (TOML).", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Train from a job file. Any key of it can be given as [bold]--section.key=value[/bold].

    [bold]model.name[/bold] is a model of torchtitan, or [bold]hf[/bold]: the Hugging Face folder [bold]model.hf_assets_path[/bold], by transformers.

    With [bold]--checkpoint.enable=true[/bold] the same command goes on where an earlier run ended or was killed. SIGTERM and the
    first Ctrl-C end the run after the step under way, with a checkpoint; a second Ctrl-C ends it at once.

    Exit status: 0 done, 143 ended by SIGTERM, 130 by Ctrl-C, 2 a mistake in the job, a full disk, or a folder in use, 1 else.
    """
    from jumar import train as train_module

    try:
        with user_errors(train_module.JobError):
            result = train_module.run(config_file, _overrides(context.args), json=json)
    except ModuleNotFoundError as error:  # the engines import theirs when they are used
        raise UserError(f"training needs more packages (the extra jumar[train]): {error}") from error
    if result and result.get("exit_status"):
        raise typer.Exit(result["exit_status"])


def _overrides(arguments: list[str]) -> list[str]:
    """``["--a.b=c", "--d.e", "f"]`` -> ``["a.b=c", "d.e=f"]``. UserError for anything that is no such pair."""
    pairs: list[str] = []
    waiting: str | None = None
    for argument in arguments:
        if waiting is not None:
            if argument.startswith("--"):
                raise UserError(f"--{waiting} has no value; write --{waiting}=VALUE")
            pairs.append(f"{waiting}={argument}")
            waiting = None
        elif argument.startswith("--") and "." in argument.split("=")[0]:
            body = argument.removeprefix("--")
            if "=" in body:
                pairs.append(body)
            else:
                waiting = body
        else:
            raise UserError(f"unexpected argument {argument!r}; write --section.key=value")
    if waiting is not None:
        raise UserError(f"--{waiting} has no value; write --{waiting}=VALUE")
    return pairs


for _command in (cli_runs.profile, cli_runs.report):
    app.command()(_command)


def main(argv: list[str] | None = None) -> None:
    """Entry point of the ``jumar`` command; ends the process with its exit status."""
    arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    command = next((a for a in arguments if a in known), "")
    where = f"jumar {command}".strip()
    if argv is None and command == "bench" and "--help" not in arguments:
        from jumar.bench.timing import restart_keeping_memory

        restart_keeping_memory(arguments)
    try:
        status = app(args=arguments, standalone_mode=False, prog_name="jumar")
    except UserError as error:
        print(f"{where}: {error}", file=sys.stderr)
        status = 2
    except _ClickException as error:
        text = error.format_message()
        print(f"{where}: {' '.join(text.split())}", file=sys.stderr)
        status = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print(f"{where}: interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        status = 0
    sys.exit(status if isinstance(status, int) else 0)
