"""The reference of the public names: every name of ``paceline.__all__`` with its signature and its docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import paceline
import paceline.classic
from reference_text import NOTE, docstring, prose, table

INTRODUCTION = """\
Every public name: `import paceline`, then `paceline.NAME`. Classes of earlier versions are in `paceline.classic`; the
package still has them itself. What is not listed here may change between versions."""
LINE = 100  # a longer signature has a line for each parameter
_SPECIAL = ("__call__", "__enter__", "__exit__", "__iter__", "__len__")


def api_page() -> str:
    """Returns the page."""
    named = [(_place(name), getattr(paceline, name)) for name in paceline.__all__ if name != "__version__"]
    lines = ["# Python API", "", NOTE, "", INTRODUCTION, ""]
    lines += table(("name", "what it is"), (_entry(name, value) for name, value in named))
    lines += ["`paceline.__version__` is the version, as text.", ""]
    for name, value in named:
        lines += _module(name, value) if isinstance(value, ModuleType) else _name(name, value)
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def _entry(name: str, value: Any) -> tuple[str, str]:
    return _link(name), " ".join(_first_paragraph(value)).replace("|", r"\|")


def _first_paragraph(value: Any) -> Iterator[str]:
    for line in docstring(inspect.getdoc(value)):
        if not line.strip():
            return
        yield line


def _place(name: str) -> str:
    """Returns where scripts take a name from, below ``paceline``."""
    return f"classic.{name}" if name in dir(paceline.classic) else name


def _link(name: str) -> str:
    return f"[paceline.{name}](#paceline{name.lower().replace('.', '')})"


def _name(name: str, value: Any) -> Iterator[str]:
    yield from [f"## paceline.{name}", ""]
    last = name.rpartition(".")[2]
    if inspect.isclass(value) and value.__name__ != last:
        yield from [f"Another name of {_link(_place(value.__name__))}.", ""]
        return
    yield from _described(f"paceline.{name}", value)
    if inspect.isclass(value):
        for method, function in _methods(value):
            shown = method.replace("__", r"\_\_")
            yield from [f"### {last}.{shown}", ""]
            yield from _described(method, function)


def _described(name: str, value: Any) -> Iterator[str]:
    signature = _signature(name, value)
    if signature:
        yield from ["```text", *signature, "```", ""]
    yield from _markdown(value)


def _markdown(value: Any) -> Iterator[str]:
    """Yields the docstring. A paragraph with columns or a drawing, which indented lines tell, is shown as it is."""
    for paragraph in "\n".join(docstring(inspect.getdoc(value))).split("\n\n"):
        is_drawn = any(line.startswith("  ") for line in paragraph.splitlines())
        yield from ["```text", paragraph.replace("`", ""), "```", ""] if is_drawn else [paragraph, ""]


def _signature(name: str, value: Any) -> list[str]:
    if getattr(value, "_is_protocol", False):
        return []
    if isinstance(value, property):
        return [f"{name}: {_type(inspect.signature(value.fget).return_annotation)}"]
    signature = inspect.signature(value)
    kept = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    signature = signature.replace(parameters=kept)
    returns = (
        ""
        if signature.return_annotation in (signature.empty, "None", None)
        else f" -> {_type(signature.return_annotation)}"
    )
    words = [_parameter(each) for each in kept]
    if any(each.kind is each.KEYWORD_ONLY for each in kept) and not any(
        each.kind is each.VAR_POSITIONAL for each in kept
    ):
        words.insert([each.kind is each.KEYWORD_ONLY for each in kept].index(True), "*")
    short = f"{name}({', '.join(words)}){returns}"
    return [short] if len(short) <= LINE else [f"{name}(", *(f"    {word}," for word in words), f"){returns}"]


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{kind}"
    return f"{parameter.name}{kind} = {_default(parameter.default)}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    text = repr(value)
    return "..." if text.startswith("<") else text


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties that our own code defines and documents, in the order of the source."""
    seen: set[str] = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("paceline"):
            continue
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            is_public = not name.startswith("_") or name in _SPECIAL
            is_code = inspect.isfunction(function) or isinstance(function, property)
            if is_public and is_code and name not in seen and inspect.getdoc(function):
                seen.add(name)
                yield name, function


def _module(name: str, module: ModuleType) -> Iterator[str]:
    """Yields the errors: each class of the module with the first sentence about it."""
    yield from [f"## paceline.{name}", "", *_markdown(module)]
    classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    rows = (
        (f"`{each.__name__}`", f"`{each.__base__.__name__}`", prose(inspect.getdoc(each) or "")) for each in classes
    )
    yield from table(("class", "is a", "meaning"), rows) if classes else ()
