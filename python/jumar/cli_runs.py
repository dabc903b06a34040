"""``jumar profile`` and ``jumar report``: what a run has left behind. Part of :mod:`jumar.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jumar.cli_common import Json, UserError, console, print_json, split, user_errors


def profile(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="A Chrome trace (.json, .json.gz), or a folder: the newest in it."
        ),
    ],
    sort: Annotated[
        str,
        typer.Option("--sort", help="self, total, calls, avg, max, bytes, flops, percent or name."),
    ] = "self",
    top: Annotated[int, typer.Option("--top", min=0, help="Rows to print; 0: all.")] = 30,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only fused, torch or autograd, comma-separated.")
    ] = None,
    by_shape: Annotated[
        bool, typer.Option("--by-shape", help="One row per operator and shapes.")
    ] = False,
    limits: Annotated[
        bool, typer.Option("--measure", help="Take the limits of this machine, measured now.")
    ] = False,
    csv: Annotated[str | None, typer.Option("--csv", help="Also write all rows here.")] = None,
    json: Json = False,
) -> None:
    """The operators in a trace of torch.profiler: calls, times, bytes, FLOPs, percent of the machine's limit."""
    from jumar import profile as profile_module
    from jumar.limits import measure
    from jumar.profile import render

    with user_errors(ValueError):
        render.check(sort, "order", tuple(profile_module.SORTS))
        kinds = [render.check(k, "kind", render.KINDS) for k in split(kind) or render.KINDS]
        read = profile_module.read(trace)
    found = profile_module.table(read, by_shape=by_shape, limits=measure() if limits else None)
    found.rows = [row for row in found.sort(sort).rows if row.kind in kinds]
    if csv is not None:
        try:
            Path(csv).write_text(found.to_csv(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{csv}: {error.strerror or error}") from error
    if json:
        document = found.to_dict()
        if top:
            document["operators"] = document["operators"][:top]
        return print_json(document)
    render.show(found, console(), top=top, shapes=by_shape, sort=sort)


def report(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="The dump_folder of a run of `jumar train`.")
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Where to write; default: report.html in FOLDER."),
    ] = None,
    json: Json = False,
) -> None:
    """One HTML file of a run, made from its files: job, environment, plots, operators, profile, how it ended."""
    from jumar.train import JobError
    from jumar.train import report as report_module

    with user_errors(JobError):
        try:
            file = report_module.write(folder, output)
        except OSError as error:
            raise UserError(f"{output or folder}: {error.strerror or error}") from error
    if json:
        return print_json({"report": str(file)})
    console().print(str(file), soft_wrap=True, markup=False, highlight=False)
