"""From a file to the tree, and from what is wrong to a message: file, line, key, wrong, allowed.

Owns: TOML, ``${env:NAME}``, line numbers, the wording of pydantic's findings. Must not know: what any key
means. Its neighbour is ``tree``.
"""

from __future__ import annotations

import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from avow.errors import ConfigError
from avow.settings import values
from avow.settings.tree import InPluginSection, PipelineConfig, Section, Source
from avow.settings.values import FromEnv, Key, Problem, Refused

AnySection = TypeVar("AnySection", bound=Section)


def load(
    path: Path,
    env: Mapping[str, str] = os.environ,
    *,
    check: Callable[[PipelineConfig], Iterable[Problem]] = lambda _: (),
    engine: str | None = None,
) -> PipelineConfig:
    """The pipeline of a file, or a ConfigError that names every problem. ``engine`` takes the place of the file's.

    ``check`` adds what settings cannot know; ``avow.plan.load_checked`` brings the sinks' offers this way.
    """
    text = _read(path)
    document, problems = _interpolate(_parse(path, text) | ({"engine": engine} if engine else {}), env)
    pipeline = _checked(document, problems, check)
    if pipeline is None or problems:
        raise _config_error(path, text, problems)
    pipeline._secrets_in_file = tuple(_literal_secrets(document))
    return pipeline


def _checked(
    document: dict[str, Any], problems: list[Problem], check: Callable[[PipelineConfig], Iterable[Problem]]
) -> PipelineConfig | None:
    """The tree of a document. What is wrong with it is added to the problems that are known already."""
    pipeline = None
    try:
        pipeline = PipelineConfig.model_validate(document)
        problems += [_without_env(problem, document) for problem in check(pipeline)]
    except ValidationError as error:
        unfilled = {problem.key for problem in problems}
        invalid = [p for p in _problems(error) if not any(p.key[: len(key)] == key for key in unfilled)]
        problems += [_without_env(p, document) for p in invalid]
    # Nothing is raised here, so that no ValidationError (which holds its input) is the context of what is raised.
    return pipeline


def declared(
    document: dict[str, Any],
    env: Mapping[str, str] | None = None,
    *,
    check: Callable[[PipelineConfig], Iterable[Problem]] = lambda _: (),
) -> PipelineConfig:
    """The pipeline of values that were never in a file, or a ConfigError that names every problem. With ``env``,
    ``${env:NAME}`` is filled in as in a file."""
    filled, problems = (document, []) if env is None else _interpolate(document, env)
    pipeline = _checked(filled, problems, check)
    if pipeline is None or problems:
        raise refused(problems)
    return pipeline


def refused(problems: Iterable[Problem]) -> ConfigError:
    """What is wrong with values that were never in a file."""
    return ConfigError("\n".join(f"{_dotted(problem.key)}: {problem.wrong}; {problem.allowed}" for problem in problems))


def cluster(brokers: str, kafka: Mapping[str, str] | None = None, env: Mapping[str, str] = os.environ) -> Source:
    """A cluster that a command line names, with all its topics, or a ConfigError that names every problem.

    ``${env:NAME}`` is filled in as in a file: a command line can be seen by others.
    """
    document = {"brokers": brokers, "topics_pattern": ".*", "kafka": dict(kafka or {})}
    return from_options(
        Source, document, lambda problem: f"--{_dotted(problem.key).replace('kafka.', 'kafka ', 1)}", env
    )


def from_options(
    kind: type[AnySection],
    document: dict[str, Any],
    option: Callable[[Problem], str],
    env: Mapping[str, str] = os.environ,
) -> AnySection:
    """A section that a command line spells, or a ConfigError that names every problem by its ``option``."""
    filled, problems = _interpolate(document, env)
    found = None
    try:
        found = kind.model_validate(filled)
    except ValidationError as error:
        problems += [_without_env(problem, filled) for problem in _problems(error, kind)]
    if found is None or problems:
        lines = (f"{option(problem)}: {problem.wrong}; {problem.allowed}" for problem in problems)
        raise ConfigError("\n".join(lines))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        wrong, advice = "no such file", "Name a pipeline file, such as examples/payments.toml."
    except OSError as error:
        wrong, advice = f"cannot be read: {error.strerror}", "Name a readable pipeline file."
    except UnicodeDecodeError as error:
        wrong, advice = f"byte {error.start} is not UTF-8", "A pipeline file is TOML in UTF-8."
    raise ConfigError(f"{path}: {wrong}", advice=advice)


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        wrong, line = "nested too deeply", ""
    except ValueError as error:
        match = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", str(error), re.S)
        wrong = match[1] if match else str(error)
        line = f":{match[2] or len(text.splitlines())}" if match else ""
    raise ConfigError(f"{path}{line}: not TOML: {_printable(wrong)}", advice="The TOML syntax is at https://toml.io.")


def _interpolate(document: dict[str, Any], env: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """The document with ``${env:NAME}`` filled in, and what could not be."""
    problems: list[Problem] = []

    def fill(value: Any, key: Key) -> Any:
        if isinstance(value, dict):
            return {name: fill(item, (*key, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [fill(item, (*key, number)) for number, item in enumerate(value)]
        if not isinstance(value, str) or "${env:" not in value:
            return value
        if "${env:" in values.ENV.sub("", value):
            problems.append(
                Problem(key, "contains a ${env:...} without a variable name", "${env:NAME}: letters, digits and _")
            )
        for name in values.ENV.findall(value):
            if name not in env:
                problems.append(Problem(key, f"the environment variable {name} is not set", f"export {name}=..."))
            elif any(unicodedata.category(character) == "Cs" for character in env[name]):
                # Bytes of the environment that are not UTF-8 arrive as lone surrogates.
                problems.append(Problem(key, f"the environment variable {name} is not UTF-8", "text in UTF-8"))
        return FromEnv(values.ENV.sub(lambda match: env.get(match[1], ""), value), value)

    filled: dict[str, Any] = fill(document, ())
    return filled, problems


_SECRET_NAME = re.compile(
    r"(password|passphrase|secret|token|key|jaas\.config|credentials?|\.pem|bearer\.config)$", re.I
)
_PASSWORD_IN_URL = re.compile(r"^\w+://[^/?#@:]*:[^/?#]+@|[?&]password=[^&#]")


def _literal_secrets(document: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a valid document whose secret is written in the file itself."""
    kafka, spark, sink = document["source"].get("kafka", {}), document.get("spark", {}), document["sink"]
    decode = {name: value for name, value in document["decode"].items() if isinstance(value, dict)}
    for name, value in sink.items():
        if isinstance(value, str) and _PASSWORD_IN_URL.search(values.ENV.sub("", values.as_written(value))):
            yield f"sink.{name}"
    own = {name: value for name, value in sink.items() if isinstance(value, dict)}
    for key, value in values.flat({"source": {"kafka": kafka}, "decode": decode, "spark": spark, "sink": own}):
        name = ".".join(key)
        if _SECRET_NAME.search(name) and not isinstance(value, FromEnv):
            yield name


def _problems(error: ValidationError, section: type[Section] = PipelineConfig, at: Key = ()) -> Iterator[Problem]:
    """``section``: what pydantic read, which stands at ``at`` in the file."""
    for details in error.errors(include_url=False):
        key = at + details["loc"]
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, Refused):
            for problem in cause.problems:
                yield replace(problem, key=key + problem.key)
        elif isinstance(cause, InPluginSection):
            yield from _problems(cause.error, cause.config, key)
        else:
            yield _pydantic_problem(key, _section_at(details["loc"][:-1], section), details["type"], details)


def _pydantic_problem(key: Key, section: type[Section], kind: str, details: Any) -> Problem:
    """Pydantic's own findings in our words. Its messages do not quote the input; we quote a wrong word. ``section`` has
    the key."""
    known = {field.alias or name: field for name, field in section.model_fields.items()}
    name = str(key[-1])
    if kind == "extra_forbidden":
        return Problem(key, f"is not a known key{values.did_you_mean(name, known)}", f"known keys: {', '.join(known)}")
    allowed = str(known[name].description) if name in known else "see docs/PIPELINE.md"
    if kind == "missing":
        return Problem(key, "is missing", allowed)
    if kind in ("literal_error", "enum") and isinstance(details["input"], str):
        words = re.findall("'([^']+)'", details["ctx"]["expected"])
        return Problem(key, f"{details['input']!r} is not known{values.did_you_mean(details['input'], words)}", allowed)
    if kind == "model_type":
        return Problem(key, "should be a table", allowed)
    return Problem(key, details["msg"].replace("Input should", "should"), allowed)


def _section_at(key: Key, section: type[Section]) -> type[Section]:
    """The section that a key names; for an item of a list, the section that holds the list."""
    for part in key:
        field = section.model_fields.get(str(part))
        inner = [] if field is None else [field.annotation, *get_args(field.annotation)]
        section = next((t for t in inner if isinstance(t, type) and issubclass(t, Section)), section)
    return section


def _config_error(path: Path, text: str, problems: list[Problem]) -> ConfigError:
    lines = _key_lines(text)
    placed = sorted((_line_of(lines, problem.key), number, problem) for number, problem in enumerate(problems))
    message = "\n".join(
        f"{path}{f':{line}' if line else ''}: {_dotted(problem.key)}: {problem.wrong}; {problem.allowed}"
        for line, _, problem in placed
    )
    return ConfigError(
        message, advice="Correct the file; docs/PIPELINE.md lists every key. `avow plan` checks it again."
    )


def _without_env(problem: Problem, document: dict[str, Any]) -> Problem:
    """The problem without its quote, if what it quotes came from the environment."""
    value: Any = document
    for part in problem.key:
        if isinstance(value, dict):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
    if not values.from_env(value):
        return problem
    variables = ", ".join(values.ENV.findall(str(values.as_written(value))))
    return replace(problem, wrong=f"the value of {variables} is not valid")


def _dotted(key: Key) -> str:
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{_printable(part)}"
    return text.removeprefix(".") or "the file"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


_KEY_PART = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)"""
_KEY = rf"{_KEY_PART}(?:\s*\.\s*{_KEY_PART})*"
_HEADER_LINE = re.compile(rf"\s*\[\s*({_KEY})\s*\]")
_KEY_LINE = re.compile(rf"\s*({_KEY})\s*=")


def _key_lines(text: str) -> dict[str, int]:
    """The line of each key, by its dotted name. Best effort: keys of inline tables are not found."""
    lines: dict[str, int] = {}
    section: list[str] = []
    in_text = False  # within a string of several lines
    for number, line in enumerate(text.split("\n"), start=1):
        if not in_text:
            if header := _HEADER_LINE.match(line):
                section = _key_path(header[1])
                lines.setdefault(".".join(section), number)
            elif key := _KEY_LINE.match(line):
                lines.setdefault(".".join([*section, *_key_path(key[1])]), number)
        in_text ^= (line.count('"""') + line.count("'''")) % 2 == 1
    return lines


def _key_path(key: str) -> list[str]:
    """The parts of a TOML key, read by TOML's own rules; none if it only looked like a key."""
    path: list[str] = []
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return path
    while isinstance(node, dict):
        ((name, node),) = node.items()
        path.append(name)
    return path


def _line_of(lines: Mapping[str, int], key: Key) -> int:
    """The line of a key, or of the nearest table around it; 0 if there is none."""
    names = [part for part in key if isinstance(part, str)]
    for size in range(len(names), 0, -1):
        if line := lines.get(".".join(names[:size])):
            return line
    return 0
