"""Where a QConfig applies: rules by name, pattern, type or function, and the attribute of a module.

`QConfigMapping` follows the shape of PyTorch's.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from fxquant.errors import ConfigurationError
from fxquant.quantization.spec import QConfig
from fxquant.support import logger
from fxquant.support.arguments import KINDS, Kind, checked, checked_class, instance

Chosen = QConfig | None  # None keeps the operator in float


@dataclass(frozen=True)
class Call:
    """One of the calls of a type in a module's forward.

    module  the module's path; "" is the model itself
    kind    a layer's class, a function, or the name of a tensor's method
    index   how many of them run before it there
    """

    module: str
    kind: Any
    index: int

    def __str__(self) -> str:
        return f"{self.index} of {_written(self.kind)} in {self.module or 'the model itself'}"


def _written(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__qualname__", str(kind))


@dataclass(frozen=True)
class Rule:
    """The source of a QConfig: the attribute of a module, a rule of the mapping, or its default.

    kind   "attribute", "call", "name", "pattern", "type" or "default"
    key    the module's path, the Call, the name, the pattern, or the type or function
    """

    kind: str
    key: Any = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.key if isinstance(self.key, Call) else _written(self.key)}".rstrip()


def is_dynamic(chosen: Chosen) -> bool:
    """Whether a rule asks for layers that are quantized at run time."""
    return chosen is not None and chosen.dynamic


DEFAULT = Rule("default")
MatchedRules = tuple[tuple[Rule, Chosen], ...]  # every rule that covers one of the user's operators with what it chooses: the nearest first


def _rules(key: Callable[[Any], Any]) -> Kind:
    def take(value: Any) -> dict[Any, Chosen]:
        if not isinstance(value, Mapping):
            raise TypeError
        return {key(rule): CHOSEN.take(chosen) for rule, chosen in value.items()}

    return Kind("a dict from rules to QConfigs", take)


def _spelling(value: Any) -> Any:
    """Return a key by which an operator can be called: a class, a function or the name of a method. Raise TypeError for anything else."""
    if not (callable(value) or isinstance(value, str)) or isinstance(value, nn.Module):
        raise TypeError
    hash(value)
    return value


CHOSEN = instance("a QConfig", QConfig).or_none("stay in float")


def _module(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _call(value: Any) -> Call:
    module, kind, index = (value.module, value.kind, value.index) if isinstance(value, Call) else value
    return Call(_module(module), _spelling(kind), KINDS["seed"].take(index))


class _Successors:
    """Alive as long as a mapping with rules is that was made from one without any."""


_HELD = ("types", "patterns", "names", "calls")  # the fields of a mapping that hold rules
MODULE = Kind('the path of a module, "" for the model itself', _module)
SPELLING = Kind("a module's class, a function like F.relu, or the name of a tensor's method", _spelling)


@checked_class(
    default=CHOSEN, types=_rules(_spelling), patterns=_rules(KINDS["pattern"].take), names=_rules(KINDS["name"].take), calls=_rules(_call)
)
@dataclass(frozen=True, eq=False)
class QConfigMapping:
    """Which QConfig applies where: global < operator or module type < name pattern < name < one call of a type < attribute `qconfig`.

    Names are dotted module paths ("layer1.0.conv1") or node names; a name also covers everything below it, and so does
    whatever a pattern matches from the start of a path on. A QConfig of None keeps what it applies to in float. Of an
    operator that several of the model's are fused into, each has its say: see the guide.

    A mapping is a value: it never changes, is equal to another that says the same, and serves any number of models. The setters,
    which have PyTorch's names, change nothing, unlike PyTorch's: each returns a mapping with one rule more, so calls chain.
    Of patterns the first that matches counts, so their order is part of the value.
    """

    default: Chosen = field(default_factory=QConfig)
    types: Mapping[Any, Chosen] = field(default_factory=dict)
    patterns: Mapping[str, Chosen] = field(default_factory=dict)
    names: Mapping[str, Chosen] = field(default_factory=dict)
    calls: Mapping[Call, Chosen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _HELD:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @checked(qconfig=CHOSEN)
    def set_global(self, qconfig: Chosen) -> QConfigMapping:
        """Return this mapping with another default."""
        return self._with_rules(default=qconfig) if self.rules() else replace(self, default=qconfig)

    @checked(kind=SPELLING, qconfig=CHOSEN)
    def set_object_type(self, kind: Any, qconfig: Chosen) -> QConfigMapping:
        """Return this mapping with a rule for a module's class, a function, or a tensor's method by name.

        A class means its modules alone. A function or a method means that function in every call form: torch.softmax is F.softmax,
        x.softmax() and nn.Softmax; torch.add is + and +=. A rule for the call form that the model uses has precedence over others.
        """
        return self._with_rules(types={**self.types, kind: qconfig})

    @checked()
    def set_host(self, *where: Any) -> QConfigMapping:
        """Return this mapping with rules that keep these in float, on the host: types and functions, module paths and node names.

        What is called `hybrid_dict` elsewhere. A rule with a QConfig for the same place is the other way about: it keeps integers where
        the compiler would leave a few operators between float ones to the host.
        """
        mapping = self
        for one in where:
            mapping = mapping.set_module_name(one, None) if isinstance(one, str) else mapping.set_object_type(one, None)
        return mapping

    @checked(qconfig=CHOSEN)
    def set_module_name_regex(self, pattern: str, qconfig: Chosen) -> QConfigMapping:
        """Return this mapping with a rule for module paths that a regular expression matches; an existing one keeps its place."""
        return self._with_rules(patterns={**self.patterns, pattern: qconfig})

    @checked(qconfig=CHOSEN)
    def set_module_name(self, name: str, qconfig: Chosen) -> QConfigMapping:
        """Return this mapping with a rule for a module's path or a node's name."""
        return self._with_rules(names={**self.names, name: qconfig})

    @checked(module_name=MODULE, object_type=SPELLING, index=KINDS["seed"], qconfig=CHOSEN)
    def set_module_name_object_type_order(self, module_name: str, object_type: Any, index: int, qconfig: Chosen) -> QConfigMapping:
        """Return this mapping with a rule for one call: the one with this index, from 0, among a type's calls in a module's forward.

        `module_name` is the path of the module whose forward has the call, "" for the model's own; a layer's calls are its parent's.
        """
        return self._with_rules(calls={**self.calls, Call(module_name, object_type, index): qconfig})

    def _with_rules(self, **rules: Any) -> QConfigMapping:
        made = replace(self, **rules)
        successors = self.__dict__.get("_successors") if self.rules() else _Successors()
        if not self.rules():
            object.__setattr__(self, "_last_successors", weakref.ref(successors))
        object.__setattr__(made, "_successors", successors)
        return made

    @property
    def lost_rules(self) -> bool:
        """Whether this mapping has no rules, and those that its setters returned are gone: PyTorch's setters change the mapping itself."""
        last = self.__dict__.get("_last_successors")
        return not self.rules() and last is not None and last() is None

    @property
    def _value(self) -> tuple[Any, ...]:
        held = (frozenset(self.types.items()), tuple(self.patterns.items()), frozenset(self.names.items()), frozenset(self.calls.items()))
        return self.default, *held

    def __eq__(self, other: object) -> bool:
        return self._value == other._value if isinstance(other, QConfigMapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and pickled as it was made: what makes its dicts read-only can be neither.
        return type(self), (self.default, *(dict(getattr(self, name)) for name in _HELD))

    def __repr__(self) -> str:
        rules = {name: dict(getattr(self, name)) for name in _HELD}
        return f"QConfigMapping({', '.join([f'default={self.default!r}', *(f'{name}={held!r}' for name, held in rules.items() if held)])})"

    def rules(self) -> list[tuple[Rule, Chosen]]:
        """Every rule but the default, with what it chooses."""
        kinds = (("call", self.calls), ("name", self.names), ("pattern", self.patterns), ("type", self.types))
        return [(Rule(kind, key), chosen) for kind, rules in kinds for key, chosen in rules.items()]

    def covering(self, node_name: str, path: str, kinds: tuple[Any, ...], places: Sequence[Call] = ()) -> MatchedRules:
        """The rules that cover the node with this name, from this module path, spelled by one of these types, which are these calls."""
        calls = [(Rule("call", call), self.calls[call]) for call in places if call in self.calls]
        names = [(Rule("name", name), self.names[name]) for name in dict.fromkeys((node_name, *prefixes(path))) if name in self.names]
        patterns = [(Rule("pattern", pattern), chosen) for pattern, chosen in self.patterns.items() if path and re.match(pattern, path)]
        types = [(Rule("type", kind), self.types[kind]) for kind in dict.fromkeys(kinds) if kind in self.types]
        return *calls, *names, *patterns, *types, (DEFAULT, self.default)


def prefixes(path: str) -> list[str]:
    """The path, then every path above it, nearest first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)] if path else []


def attached_qconfigs(model: nn.Module) -> dict[str, Chosen]:
    """The QConfigs that stand on a model's modules as their attribute `qconfig`, by module path; None keeps a module in float.

    Objects of another library under that name are left out, with one log line; a None beside them is that library's, too.
    """
    found = {path: module.__dict__["qconfig"] for path, module in model.named_modules() if "qconfig" in module.__dict__}
    foreign = {path: qconfig for path, qconfig in found.items() if qconfig is not None and not isinstance(qconfig, QConfig)}
    if not foreign:
        return found
    kinds = ", ".join(sorted({f"{type(qconfig).__module__}.{type(qconfig).__qualname__}" for qconfig in foreign.values()}))
    logger.warning("the qconfig of %d modules is ignored, since it is not an fxquant.QConfig but a %s", len(foreign), kinds)
    return {path: qconfig for path, qconfig in found.items() if isinstance(qconfig, QConfig)}


def as_mapping(qconfig: QConfig | QConfigMapping | None) -> QConfigMapping:
    """Return the mapping that a mapping, one QConfig for everything, or None stands for."""
    if isinstance(qconfig, QConfigMapping):
        return qconfig
    if qconfig is not None and not isinstance(qconfig, QConfig):
        raise ConfigurationError(
            f"a {type(qconfig).__name__} is not a qconfig",
            because="a qconfig is a fxq.QConfig for every operator, a fxq.QConfigMapping, or None for the default",
            remedy="pass one of these",
        )
    return QConfigMapping(default=qconfig or QConfig())
