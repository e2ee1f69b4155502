"""Modules of another toolkit, built from tables: the row of a name has its implementation, first release and differences.

`from toolkit.module import name` returns the implementation. For an unsupported name `hasattr` is False, and its import raises
ImportError with the remedy. A module's implementation is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, NamedTuple

from fxquant.compat.common import Refusal
from fxquant.errors import ConfigurationError


class MissingName(ConfigurationError, AttributeError):
    """An attribute of a mirrored module that is not supported."""


class MissingImport(ConfigurationError, ImportError):
    """The import of an unsupported name from a mirrored module."""


class Row(NamedTuple):
    """The implementation of a name of another toolkit.

    served  "module:name", below the package of the tables, or a Refusal
    since   the first release of the toolkit that has it
    native  the equivalent call in fxquant itself; empty if none is needed
    note    how its meaning differs; empty if it does not
    """

    name: str
    served: str | Refusal
    since: str = "1.0"
    native: str = ""
    note: str = ""


def serve(home: str, names: str, since: str = "1.0", native: str = "", note: str = "") -> list[Row]:
    """Return rows for names that one module implements under the same names."""
    return [Row(name, f"{home}:{name}", since, native, note) for name in names.split()]


def refuse(names: str, because: str, remedy: str, since: str = "1.0") -> list[Row]:
    """Return rows for names that are unsupported for one reason."""
    return [Row(name, Refusal(because, remedy), since) for name in names.split()]


class Tables:
    """The modules of a toolkit, by dotted path below its package, and the rows of each.

    package   the package whose modules are mirrored: "fxquant.compat.horizon"
    homes     the package of the implementations: "fxquant.compat.horizon.served"
    aliases   names of packages that `install` puts into sys.modules, each with its module
    other     a function that resolves names without a row, given a module's path and the name; raises AttributeError for an unknown one
    """

    def __init__(
        self,
        package: str,
        homes: str,
        rows: Mapping[str, Sequence[Row]],
        aliases: Mapping[str, str],
        other: Callable[[str, str], Any] | None = None,
    ) -> None:
        self.package, self.homes, self.aliases, self.other = package, homes, dict(aliases), other
        self.modules = {path: {row.name: row for row in listed} for path, listed in rows.items()}
        for path in list(self.modules):  # the parents of a module are modules as well
            parts = path.split(".")
            for end in range(1, len(parts)):
                self.modules.setdefault(".".join(parts[:end]), {})
        self.modules.setdefault("", {})
        self._finder: Finder | None = None

    # ---- resolving names --------------------------------------------------------------------------------------------

    def names(self, path: str) -> list[str]:
        """Return the supported names of a module."""
        return [name for name, row in self.modules[path].items() if not isinstance(row.served, Refusal)]

    def value(self, path: str, name: str) -> Any:
        """Return the implementation of a name. Raises MissingName for an unsupported one, and AttributeError for an unknown one."""
        row = self.modules[path].get(name)
        child = ".".join(filter(None, (path, name)))
        if row is None and child in self.modules:
            return importlib.import_module(f"{self.package}.{child}")
        if row is None and self.other is not None and not name.startswith("__"):
            return self.other(path, name)
        if row is None:
            raise AttributeError(f"module {self.shown(path)!r} has no attribute {name!r}")
        if isinstance(row.served, Refusal):
            raise MissingName(f"{self.shown(path)} has no {name}", because=row.served.because, remedy=row.served.remedy)
        home, _, attribute = row.served.partition(":")
        found = importlib.import_module(f"{self.homes}.{home}" if home else self.homes)
        return getattr(found, attribute) if attribute else found

    def missing(self, path: str, name: str) -> MissingImport:
        """Return the error for an import of an unsupported or unknown name."""
        row = self.modules.get(path, {}).get(name)
        if row is not None and isinstance(row.served, Refusal):
            return MissingImport(f"{self.shown(path)} has no {name}", because=row.served.because, remedy=row.served.remedy)
        return MissingImport(
            f"{self.shown(path)} has no {name}",
            because=f"the tables of {self.package} have no such name",
            remedy=f"leave it out, or use fxquant's own functions; {self.package} lists what there is: dir() of its modules",
        )

    def shown(self, path: str) -> str:
        """Return the dotted name of a module in the user's terms."""
        for alias, inner in self.aliases.items():
            if inner and (path == inner or path.startswith(inner + ".")):
                return alias + path[len(inner) :]
        return ".".join(filter(None, (self.package, path)))

    # ---- modules ----------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Make the modules of the package importable."""
        if self._finder is None:
            root = sys.modules[self.package]
            root.__dict__.update(_tables=self, _path="")
            root.__class__ = Package
            self._finder = Finder(self)
            sys.meta_path.append(self._finder)

    def install(self, replace: bool = False) -> None:
        """Put the toolkit's own names into sys.modules: `import toolkit` is then an import of the mirrored package.

        replace   whether to hide an installed package of that name. If False, an installed one raises ConfigurationError.
        """
        self.activate()
        assert self._finder is not None
        for alias, path in self.aliases.items():
            there = sys.modules.get(alias)
            mirrored = importlib.import_module(".".join(filter(None, (self.package, path))))
            if there is mirrored:
                continue
            if not replace and (there is not None or _is_installed(alias)):
                raise ConfigurationError(
                    f"{alias} is there already",
                    because="a program that imports it would meet one or the other, depending on the order",
                    remedy=f"uninstall it, or import {self.package} under its own name",
                )
            for name in [name for name in sys.modules if name == alias or name.startswith(alias + ".")]:
                del sys.modules[name]
            sys.modules[alias] = mirrored
            parent, _, name = alias.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], name, mirrored)
            self._finder.roots[alias] = path
        importlib.invalidate_caches()


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class Package(ModuleType):
    """A module in which an imported submodule does not hide an attribute: `quantization.prepare` is also a function."""

    def __setattr__(self, name: str, value: Any) -> None:
        tables: Tables = self.__dict__["_tables"]
        if not (isinstance(value, ModuleType) and name in tables.modules[self.__dict__["_path"]]):
            super().__setattr__(name, value)


class Mirrored(Package):
    """A module with the names of a table."""

    def __init__(self, tables: Tables, path: str) -> None:
        self.__dict__.update(_tables=tables, _path=path)
        super().__init__(".".join(filter(None, (tables.package, path))), f"{tables.shown(path)}, over fxquant's functions.")
        self.__dict__.update(_tables=tables, _path=path, __path__=[], __all__=tables.names(path))

    def __getattr__(self, name: str) -> Any:
        return self._tables.value(self._path, name)

    def __dir__(self) -> Iterable[str]:
        return [*self.__all__, *(name for name in self.__dict__ if not name.startswith("_"))]


class Finder(MetaPathFinder, Loader):
    """Imports the modules of tables, and rejects modules that the tables lack; it is the last finder."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.roots = {tables.package: ""}  # the module of the tables, by the name of an imported package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        for root, inner in self.roots.items():
            if not fullname.startswith(root + "."):
                continue
            rest = ".".join(filter(None, (inner, fullname[len(root) + 1 :])))
            if rest in self.tables.modules:
                return importlib.machinery.ModuleSpec(fullname, self, origin=rest, is_package=True)
            parent, _, name = rest.rpartition(".")
            if name.startswith("__"):
                return None
            raise self.tables.missing(parent, name)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        own = f"{self.tables.package}.{spec.origin}"
        return sys.modules[own] if own in sys.modules else Mirrored(self.tables, spec.origin or "")

    def exec_module(self, module: ModuleType) -> None:
        sys.modules.setdefault(f"{self.tables.package}.{module.__dict__['_path']}", module)


def page(tables: Tables) -> str:
    """Return the tables as a page: a row for each name, with the module it is imported from."""
    homes: dict[str, list[str]] = {}
    rows: dict[str, Row] = {}
    for path, listed in tables.modules.items():
        for name, row in listed.items():
            rows.setdefault(name, row)
            homes.setdefault(name, []).append(path)
    served = [name for name, row in rows.items() if not isinstance(row.served, Refusal)]
    lines = ["| name | since | meaning | in fxquant |", "|---|---|---|---|"]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(served, key=str.lower):
        row = rows[name]
        groups.setdefault((row.since, row.note or "kept", row.native), []).append(name)
    for (since, note, native), names in groups.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {since} | {note} | {native} |")
    lines += ["", "| refused | because | instead |", "|---|---|---|"]
    refused: dict[Refusal, list[str]] = {}
    for name in sorted(rows, key=str.lower):
        found = rows[name].served
        if isinstance(found, Refusal):
            refused.setdefault(found, []).append(name)
    for refusal, names in refused.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {refusal.because} | {refusal.remedy} |".replace("||", "&#124;&#124;"))
    return "\n".join(lines) + "\n"
