"""Reads a job file and the command line's overrides into one checked set of values."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jumar.spelling import nearest
from jumar.train.errors import JobError
from jumar.train.schema import HF, SECTIONS, Key, elsewhere

_KINDS: dict[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "strs": "a list of strings",
    "lists": "a list of lists of strings",
}


@dataclass(frozen=True)
class Job:
    """A checked job: every section with every key, defaults filled in.

    Attributes:
        file: the job file.
        values: section -> key -> value; paths are as written, see :meth:`path`.
        given: the ``section.key`` names that the file or an override set.
    """

    file: Path
    values: dict[str, dict[str, Any]]
    given: frozenset[str]

    def __getitem__(self, section: str) -> dict[str, Any]:
        return self.values[section]

    def path(self, name: str) -> Path | None:
        """The existing file or folder that a path key (``section.key``) names: beside the job file, or where we are.

        Raises:
            JobError: it is set, and exists in neither place.
        """
        section, key = name.split(".")
        text = self.values[section][key]
        if not text:
            return None
        given = Path(text).expanduser()
        places = [given] if given.is_absolute() else [self.file.parent / given, Path.cwd() / given]
        for place in places:
            if place.exists():
                return place.resolve()
        tried = " or ".join(str(place) for place in dict.fromkeys(places))
        raise JobError(f"{name} = {text!r}: no such file or folder (looked for {tried})")

    @property
    def dump_folder(self) -> Path:
        """Where everything is written; absolute."""
        return Path(self.values["job"]["dump_folder"]).expanduser().resolve()


def load(config_file: str, overrides: Iterable[str] = ()) -> Job:
    """Reads a job file.

    Args:
        config_file: a TOML file.
        overrides: ``section.key=value`` strings, which win over the file; leading dashes are allowed.
            ``training.steps`` among them wins over the file's ``training.epochs``, too.

    Raises:
        JobError: the file is missing or is no TOML; a section, key, value or type is unknown or wrong. The text names
            the nearest valid one.
    """
    file = Path(config_file).expanduser()
    if not file.is_file():
        raise JobError(f"job file {config_file!r} does not exist")
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{config_file}: not a TOML file: {error}") from error
    values = {s: {k.name: _copy(k.default) for k in keys} for s, keys in SECTIONS.items()}
    given = set()
    for section, table in content.items():
        _section(section, config_file)
        if not isinstance(table, dict):
            raise JobError(f"{config_file}: {section} must be a section: [{section}]")
        for name, value in table.items():
            key = _key(section, name, config_file)
            values[section][name] = _check(section, key, value, config_file)
            given.add(f"{section}.{name}")
    commanded = set()
    for override in overrides:
        name, separator, text = override.lstrip("-").partition("=")
        if not separator or "." not in name:
            raise JobError(f"override {override!r}: expected section.key=value")
        section, name = name.split(".", 1)
        _section(section, "command line")
        key = _key(section, name, "command line")
        value = _parse(section, key, text)
        values[section][name] = _check(section, key, value, "command line")
        commanded.add(f"{section}.{name}")
    given |= commanded
    if "training.steps" in commanded and "training.epochs" not in commanded:
        values["training"]["epochs"] = None  # else the file's number of passes would win over the command line
    absent = elsewhere(values["model"]["name"] or "")
    for section, keys in SECTIONS.items():
        for key in keys:
            foreign = f"{section}.{key.name}" in absent
            if key.required and not foreign and values[section][key.name] in (None, ""):
                raise JobError(f"{config_file}: {section}.{key.name} is missing ({key.text})")
            if foreign and values[section][key.name] != key.default:
                raise JobError(f"{config_file}: {section}.{key.name} is nothing for {_engine(values)}")
    _check_profiling(values, config_file)
    return Job(file.resolve(), values, frozenset(given))


def _engine(values: dict[str, dict[str, Any]]) -> str:
    name = values["model"]["name"]
    if name == HF:
        return "a Hugging Face folder (model.name = 'hf'): only torchtitan has it"
    return f"the torchtitan model {name!r}: it goes with model.name = 'hf'"


def _check_profiling(values: dict[str, dict[str, Any]], where: str) -> None:
    """A profile that would be empty is a mistake."""
    section, steps = values["profiling"], values["training"]["steps"]
    if not section["enable_profiling"]:
        return
    from jumar.profile import Settings

    settings = Settings(**section)
    try:
        any_step = settings.recorded(1, steps)
    except ValueError as error:
        raise JobError(f"{where}: profiling.{error}") from error
    if not any_step:
        raise JobError(
            f"{where}: profiling.profile_freq = {settings.profile_freq} records none of training.steps = {steps} steps"
        )


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _section(section: str, where: str) -> None:
    if section in SECTIONS:
        return
    hint = nearest(section, SECTIONS)
    raise JobError(f"{where}: unknown section [{section}]{hint} (known: {', '.join(SECTIONS)})")


def _key(section: str, name: str, where: str) -> Key:
    keys = {key.name: key for key in SECTIONS[section]}
    if name in keys:
        return keys[name]
    longer = [n for n in keys if n.startswith(f"{name}_")]
    elsewhere = [s for s, others in SECTIONS.items() if any(k.name == name for k in others)]
    if len(longer) == 1:
        hint = f"; did you mean {longer[0]!r}?"
    elif elsewhere:
        hint = f"; did you mean '{elsewhere[0]}.{name}'?"
    else:
        hint = nearest(name, keys)
        if not hint:
            every = {k.name: s for s, others in SECTIONS.items() for k in others}
            close = difflib.get_close_matches(name, every, n=1, cutoff=0.75)
            hint = f"; did you mean '{every[close[0]]}.{close[0]}'?" if close else ""
    if not hint:
        hint = f" (known: {', '.join(keys)})"
    raise JobError(f"{where}: unknown key '{section}.{name}'{hint}")


def _parse(section: str, key: Key, text: str) -> Any:
    """The value of an override's text, by the key's kind."""
    text = text.strip()
    if key.default is None and not key.required and text.lower() in ("none", "null"):
        return None
    if key.kind == "str":
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if quoted else text
    if key.kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if key.kind == "strs" and not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise JobError(
            f"command line: {section}.{key.name} must be {_KINDS[key.kind]}, got {text!r}"
        ) from error


def _fits(kind: str, value: Any) -> bool:
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "str":
        return isinstance(value, str)
    if kind == "strs":
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    return isinstance(value, list) and all(_fits("strs", part) for part in value)


def _check(section: str, key: Key, value: Any, where: str) -> Any:
    name = f"{section}.{key.name}"
    if value is None:
        return None
    if not _fits(key.kind, value):
        raise JobError(f"{where}: {name} must be {_KINDS[key.kind]}, got {value!r}")
    if key.choices:
        for part in value if key.kind == "strs" else [value]:
            if part not in key.choices:
                hint = nearest(part, key.choices)
                raise JobError(f"{where}: {name} = {part!r} is not one of {', '.join(key.choices)}{hint}")
    if key.minimum is not None and value < key.minimum:
        raise JobError(f"{where}: {name} = {value} is less than {key.minimum:g}")
    return float(value) if key.kind == "float" else value
