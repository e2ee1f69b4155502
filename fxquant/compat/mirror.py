"""Modules of another toolkit, built from tables: the row of a name has its implementation, first release and differences.

`from toolkit.module import name` returns the implementation. For an unsupported name `hasattr` is False, and its import raises
ImportError with the remedy. A module's implementation is imported when one of its names is first used.

Tables that cover a part of an installed toolkit (`partly`) leave the rest to it: a name without a row is the toolkit's own, and so is a
module without rows. The toolkit's own modules must import its own functions, so `aside` replaces the mirrors while one is executed.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fxquant.compat.common import Refusal, refused
from fxquant.errors import ConfigurationError


class MissingName(ConfigurationError, AttributeError):
    """The error for reading an attribute of a mirrored module that is not supported."""


class MissingImport(ConfigurationError, ImportError):
    """The import of an unsupported name from a mirrored module."""


class Row(NamedTuple):
    """The implementation of a name of another toolkit."""

    name: str
    served: str | Refusal  # "module:name", below the package of the tables, or a Refusal
    since: str = "1.0"  # the first release of the toolkit that has it
    native: str = ""  # the equivalent call in fxquant itself; empty if none is needed
    note: str = ""  # how its meaning differs; empty if it does not


def read_rows(file: Path) -> dict[str, list[Row]]:
    """Return the rows of each module, by its dotted path, from a file with tabs: names, modules, home, since, instead, note.

    Names and modules are separated by spaces; "." is the package itself. A home is a module that implements names, or "module:name".
    A home "-" stands for names that are not supported; then `instead` is the remedy, and `note` the reason.
    """
    rows: dict[str, list[Row]] = {}
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        names, modules, home, since, instead, note = line.split("\t")
        for path, name in itertools.product(modules.split(), names.split()):
            if home == "-":
                row = Row(name, Refusal(note, instead), since)
            else:
                row = Row(name, home if ":" in home else f"{home}:{name}", since, instead, note)
            rows.setdefault("" if path == "." else path, []).append(row)
    return rows


class Tables:
    """The modules of a toolkit, by dotted path below its package, and the rows of each.

    package   the package whose modules are mirrored: "fxquant.compat.horizon"
    homes     the package of the implementations: "fxquant.compat.horizon.served"
    file      the file of the rows: see `read_rows`
    aliases   names of packages that `install` puts into sys.modules, each with its module
    partly    why a name of the toolkit itself cannot be used, if the toolkit is not installed; None if the tables have all its names
    beside    packages that programs import beside the toolkit: why each cannot be used, where it is not installed
    """

    def __init__(
        self, package: str, homes: str, file: Path, aliases: Mapping[str, str], partly: Refusal | None = None,
        beside: Mapping[str, Refusal] | None = None,
    ) -> None:  # fmt: skip
        self.package, self.homes, self.aliases, self.partly, self.beside = package, homes, dict(aliases), partly, beside or {}
        self.modules = {path: {row.name: row for row in listed} for path, listed in read_rows(file).items()}
        for path in [*self.modules, ""]:  # the parents of a module are modules as well
            for parent in itertools.accumulate(path.split("."), "{}.{}".format):
                self.modules.setdefault(parent, {})
        self.roots: dict[str, str] = {}  # the aliases that `install` has put into sys.modules
        self.own: dict[str, ModuleType] = {}  # the toolkit's modules under the names that have mirrors
        self.depth = 0  # how many blocks of `aside` are being executed
        self._finder: Finder | None = None
        self._lock = threading.Lock()

    # ---- resolving names --------------------------------------------------------------------------------------------

    def names(self, path: str) -> list[str]:
        return [name for name, row in self.modules[path].items() if not isinstance(row.served, Refusal)]

    def exported(self, path: str) -> list[str]:
        """Return the names that `from module import *` binds: the supported names, and the names of the toolkit's own module."""
        own = [
            name
            for module in self.own_modules(path)
            for name in getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
            if name not in self.modules[path] and hasattr(module, name)
        ]
        return [*self.names(path), *dict.fromkeys(own)]

    def value(self, path: str, name: str) -> Any:
        """Return the implementation of a name. Raises MissingName for an unsupported one, and AttributeError for an unknown one."""
        row = self.modules[path].get(name)
        child = ".".join(filter(None, (path, name)))
        if row is None and child in self.modules:
            return importlib.import_module(f"{self.package}.{child}")
        if row is None:
            return self._own_value(path, name)
        if isinstance(row.served, Refusal):
            raise MissingName(f"{self.shown(path)} has no {name}", because=row.served.because, remedy=row.served.remedy)
        home, _, attribute = row.served.partition(":")
        module = importlib.import_module(f"{self.homes}.{home}" if home else self.homes)
        return getattr(module, attribute) if attribute else module

    def _own_value(self, path: str, name: str) -> Any:
        """Return the toolkit's own object of this name. Raises MissingName without the toolkit, AttributeError for an unknown name."""
        if name.startswith("__") and name != "__version__":  # asked of every loaded module, as by inspect.getmodule: nothing is imported
            modules = [self.own[alias] for alias in self.aliased(path) if alias in self.own]
        else:
            modules = self.own_modules(path)
            if not modules and (absent := self.absent(path)):
                raise MissingName(f"{name} is not supported", because=absent.because, remedy=absent.remedy)
        for module in modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {self.shown(path)!r} has no attribute {name!r}")

    def absent(self, path: str) -> Refusal | None:
        """Return why the toolkit's own names of a module without an own module cannot be used; None if the tables have all names."""
        top = self.shown(path).partition(".")[0]
        if self.partly is None or self.own_module(top) is not None:
            return self.partly
        return Refusal(f"it is a name of {top}, which is not installed", f"install it: pip install {top}")

    def own_modules(self, path: str) -> list[ModuleType]:
        """Return the toolkit's own modules of this path: at most one for each alias."""
        return [module for name in self.aliased(path) if self.partly and (module := self.own_module(name)) is not None]

    def own_module(self, name: str) -> ModuleType | None:
        """Return the toolkit's own module of this name, or None if there is none."""
        with self.aside():
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name and f"{name}.".startswith(f"{error.name}."):
                    return None
                raise  # the module is there, and one that it imports is not

    def missing(self, path: str, name: str) -> MissingImport:
        """Return the error for an import of an unsupported or unknown name."""
        row = self.modules.get(path, {}).get(name)
        why = row.served if row is not None and isinstance(row.served, Refusal) else self.absent(path)
        if why is None:
            remedy = f"leave it out, or use fxquant's own functions; {self.package} lists what there is: dir() of its modules"
            why = Refusal(f"the tables of {self.package} have no such name", remedy)
        return MissingImport(f"{self.shown(path)} has no {name}", because=why.because, remedy=why.remedy)

    def aliased(self, path: str) -> list[str]:
        """Return the toolkit's names of the module at `path`: below the aliases whose own path is the longest prefix of `path`."""
        within = [inner for inner in self.aliases.values() if not inner or path == inner or path.startswith(inner + ".")]
        longest = max(within, key=len, default=None)
        rest = path[len(longest) :].lstrip(".") if longest is not None else ""
        return [".".join(filter(None, (alias, rest))) for alias, inner in self.aliases.items() if inner == longest]

    def shown(self, path: str) -> str:
        """Return the dotted name of a module in the user's terms."""
        return next(iter(self.aliased(path)), ".".join(filter(None, (self.package, path))))

    @property
    def tops(self) -> set[str]:
        """Return the names of the top packages of an installed toolkit that the tables cover in part."""
        return {root.partition(".")[0] for root in self.roots} if self.partly else set()

    def path_of(self, name: str) -> str | None:
        """Return the path of a module that is imported under this name, or None for a module outside of the mirrored packages."""
        for root, inner in {self.package: "", **self.roots}.items():
            if name == root or name.startswith(root + "."):
                return ".".join(filter(None, (inner, name[len(root) + 1 :])))
        return None

    # ---- modules ----------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Make the modules of the package importable."""
        if self._finder is None:
            root = sys.modules[self.package]
            root.__dict__.update(_tables=self, _path="")
            root.__class__ = Package
            self._finder = Finder(self)
            sys.meta_path.insert(0, self._finder)

    def install(self, replace: bool = False) -> None:
        """Put the toolkit's own names into sys.modules: `import toolkit` is then an import of the mirrored package.

        replace   whether to hide an installed package of that name. If False, an installed one raises ConfigurationError.
        """
        self.activate()
        for alias, path in self.aliases.items():
            there = sys.modules.get(alias)
            mirrored = importlib.import_module(".".join(filter(None, (self.package, path))))
            if there is mirrored:
                continue
            if not replace and (there is not None or _is_installed(alias)):
                raise refused("install", alias=alias, package=self.package)
            for name in [name for name in sys.modules if not self.partly and (name == alias or name.startswith(alias + "."))]:
                del sys.modules[name]
            self.roots[alias] = path
        self._cover()
        if self.partly:
            sys.modules[self.package].__dict__["__all__"] = self.exported("")
        importlib.invalidate_caches()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Put the toolkit's own modules into sys.modules, in place of their mirrors, until the block ends."""
        with self._lock:  # never during an import, which may wait for another thread's
            self.depth += 1
            if self.depth == 1:
                for name in sorted([name for name, module in sys.modules.items() if isinstance(module, Package) and self._is_alias(name)]):
                    _bind(name, self.own.get(name))
        try:
            yield
        finally:
            with self._lock:
                self.depth -= 1
                if not self.depth:
                    self._cover()

    def _is_alias(self, name: str) -> bool:
        return any(name == root or name.startswith(root + ".") for root in self.roots)

    def _cover(self) -> None:
        """Put mirrors of the toolkit's roots and loaded modules into sys.modules; the modules that they replace are kept in `own`."""
        for name in sorted({*self.roots, *filter(self._is_alias, sys.modules)}):
            path, there = self.path_of(name), sys.modules.get(name)
            if path not in self.modules or isinstance(there, Package):
                continue
            if there is not None:
                self.own[name] = there
            _bind(name, importlib.import_module(".".join(filter(None, (self.package, path)))))


def _bind(name: str, module: ModuleType | None) -> None:
    """Set a module in sys.modules and as an attribute of the package above it, or remove it for None."""
    parent, _, child = name.rpartition(".")
    above = sys.modules.get(parent)
    if module is None:
        sys.modules.pop(name, None)
        if above is not None:
            above.__dict__.pop(child, None)
        return
    sys.modules[name] = module
    if above is not None:
        setattr(above, child, module)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class Package(ModuleType):
    """A module in which an imported submodule does not hide an attribute: `quantization.prepare` is also a function.

    The submodules of an installed toolkit are attributes of that toolkit's package, where `__getattr__` finds them.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        tables: Tables = self.__dict__["_tables"]
        if isinstance(value, ModuleType) and (
            name in tables.modules[self.__dict__["_path"]] or not value.__name__.startswith(tables.package + ".")
        ):
            return
        super().__setattr__(name, value)


class Mirrored(Package):
    """A module with the names of a table."""

    def __init__(self, tables: Tables, path: str) -> None:
        self.__dict__.update(_tables=tables, _path=path)
        super().__init__(".".join(filter(None, (tables.package, path))), f"{tables.shown(path)}, over fxquant's functions.")
        self.__dict__.update(_tables=tables, _path=path, __path__=[])

    def __getattr__(self, name: str) -> Any:
        return self._tables.exported(self._path) if name == "__all__" else self._tables.value(self._path, name)

    def __dir__(self) -> Iterable[str]:
        return [*self.__all__, *(name for name in self.__dict__ if not name.startswith("_"))]


class Finder(MetaPathFinder, Loader):
    """Imports the modules of tables before all other finders, and the toolkit's own modules by its own files.

    A module without a table, of a toolkit that is mirrored as a whole, raises MissingImport.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        tables = self.tables
        inner, ours = tables.path_of(fullname), fullname.startswith(tables.package + ".")
        if tables.depth and not ours:
            return None
        if inner in tables.modules:
            return importlib.machinery.ModuleSpec(fullname, self, origin=inner, is_package=True)
        why = tables.beside.get(fullname) if tables.roots else None
        if why is not None and importlib.machinery.PathFinder.find_spec(fullname) is None:
            raise MissingImport(f"{fullname} is not installed", because=why.because, remedy=why.remedy)
        if inner is None:
            return self._executed_aside(fullname, path) if fullname.partition(".")[0] in tables.tops else None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if ours else None
        return spec or self._own(fullname, inner, ours)

    def _executed_aside(self, fullname: str, path: Any) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of another module of the toolkit, which imports the toolkit's own modules."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_aside(module: ModuleType) -> None:
                with self.tables.aside():
                    execute(module)

            spec.loader.exec_module = execute_aside  # type: ignore[method-assign]
        return spec

    def _own(self, fullname: str, path: str, ours: bool) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module without a table, which is the toolkit's own; raises ImportError if the toolkit has none."""
        tables = self.tables
        parent, _, name = path.rpartition(".")
        above = [] if name in tables.modules.get(parent, {}) else tables.own_modules(parent)
        for package in above:
            own = f"{package.__name__}.{name}" if ours else fullname
            if importlib.machinery.PathFinder.find_spec(own, getattr(package, "__path__", [])) is not None:
                return importlib.machinery.ModuleSpec(fullname, self, loader_state=own)
        if name.startswith("__"):
            return None
        if above:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        raise tables.missing(parent, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.loader_state is None:
            own = f"{self.tables.package}.{spec.origin}"
            return sys.modules[own] if own in sys.modules else Mirrored(self.tables, spec.origin or "")
        with self.tables.aside():
            module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state  # the import has replaced it
        else:
            sys.modules.setdefault(f"{self.tables.package}.{module.__dict__['_path']}", module)
