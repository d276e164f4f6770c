"""The page of calm's JSON documents, from the classes that write and read them."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
import textwrap
from typing import Any

import msgspec

import calm
import research
from calm.core import documents

HEAD = """# JSON documents

Each document names its schema and its version. The version changes when a program that reads the one before
would misread it; new members do not change it.
"""


def plain(text: str) -> str:
    """Text as Markdown that shows it unchanged, except for code between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([\\*_\[\]|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |\n"


def field_comments(kind: type) -> dict[str, str]:
    """What the source says below each field of a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    assert isinstance(tree.body[0], ast.ClassDef)
    found = {}
    for field, comment in itertools.pairwise(tree.body[0].body):
        if isinstance(field, ast.AnnAssign) and isinstance(comment, ast.Expr):
            value = comment.value
            if isinstance(field.target, ast.Name) and isinstance(value, ast.Constant):
                found[field.target.id] = " ".join(str(value.value).split())
    return found


def title(name: str) -> str:
    """The name of a structure; msgspec puts the module before a name that two structures have."""
    module, _, own = name.rpartition(".")
    return f"{own} of {module.rpartition('.')[2]}" if module else own


def type_name(schema: dict[str, Any], parts: dict[str, Any]) -> str:
    """A JSON schema's type in a word or two; structures by their names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if "enum" in parts[name]:
            return type_name(parts[name], parts)
        return f"[{title(name)}](#{title(name).lower().replace(' ', '-')})"
    if "anyOf" in schema:
        return " or ".join(type_name(each, parts) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        items = schema.get("items") or {"type": "array"}
        return f"list of {type_name(items, parts)}" if schema.get("items") else "list"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {type_name(schema['additionalProperties'], parts)}"
    return str(schema.get("type", "any"))


def page() -> str:
    """The page of the JSON documents: each class of them, and the structures that they have."""
    for package in (calm, research):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    kinds = sorted(documents.Document.__subclasses__(), key=documents.schema)
    schemas, parts = msgspec.json.schema_components(kinds, ref_template="#/{name}")
    classes: dict[str, type] = {}
    for each in [*kinds, *msgspec_classes()]:
        classes |= {each.__name__: each, f"{each.__module__}.{each.__name__}": each}
    text = HEAD
    top = {schema["$ref"].rpartition("/")[2] for schema in schemas}
    for name in [*sorted(top), *sorted(parts.keys() - top)]:
        part = parts[name]
        if "properties" not in part and "prefixItems" not in part:
            continue
        tag = part.get("properties", {}).get("schema", {}).get("enum")
        text += f"\n## {title(name)}\n\n" + (f"Schema `{tag[0]}`. " if tag else "")
        text += f"{plain(' '.join(part.get('description', '').split()))}\n"
        comments = field_comments(classes[name]) if name in classes else {}
        if "properties" in part:
            text += f"\n{row('member', 'type', 'what it is')}{row('---', '---', '---')}"
            for member, schema in part["properties"].items():
                text += row(f"`{member}`", type_name(schema, parts), plain(comments.get(member, "")))
        else:
            text += f"\nA list of {', '.join(type_name(each, parts) for each in part['prefixItems'])}.\n"
    return text


def msgspec_classes() -> list[type]:
    """Every structure and dataclass of the modules of calm and research."""
    return [
        each
        for name, module in list(sys.modules.items())
        if name.startswith(("calm.", "research."))
        for each in vars(module).values()
        if isinstance(each, type)
        and (issubclass(each, msgspec.Struct) or hasattr(each, "__dataclass_fields__"))
    ]
