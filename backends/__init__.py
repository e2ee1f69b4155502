"""The registry of targets by name."""

if __name__ != "fxquant.backends":
    raise ImportError("import this package as fxquant.backends: under another name every class would exist twice")

import difflib
import pkgutil
from collections.abc import Iterable
from functools import reduce
from importlib import import_module

from fxquant.errors import ConfigurationError, UnknownTarget
from fxquant.kernels.kernel import Kernel
from fxquant.quantization.spec import DEFAULT, QConfig, Rule
from fxquant.support.arguments import shown
from fxquant.target import Target

# Each folder here that defines TARGETS is a family of targets, so no list has to be maintained.
_FOLDERS = [import_module(f"{__name__}.{folder.name}") for folder in pkgutil.iter_modules(__path__) if folder.ispkg]
TARGETS: dict[str, Target] = {target.name: target for folder in _FOLDERS for target in getattr(folder, "TARGETS", ())}
KERNELS: tuple[Kernel, ...] = tuple(kernel for folder in _FOLDERS for kernel in getattr(folder, "KERNELS", ()))


def kernels() -> tuple[Kernel, ...]:
    """Return the kernels with which PyTorch can run integer models fast."""
    return KERNELS


def get(name: str | Target) -> Target:
    """Return the target of this name, march or chip. Raises UnknownTarget, which lists the known names.

    A variant (`Target.variant`) may follow the name: "nash-e/requantize".
    """
    if isinstance(name, Target):
        return name
    named = getattr(name, "value", name)
    base, *variants = named.lower().replace("_", "-").split("/") if isinstance(named, str) else [""]
    for target in TARGETS.values():
        if base == target.name or base in target.aliases:
            return reduce(Target.variant, variants, target)
    aliases = {alias: target.name for target in TARGETS.values() for alias in (target.name, *target.aliases)}
    near = difflib.get_close_matches(base, aliases, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(target.name for target in TARGETS.values() if not target.consistency)
    others = ", ".join(target.aliases[0] for target in TARGETS.values() if target.aliases and not target.consistency)
    because = f"the targets are {listed}; some have the names of their chips or of PyTorch's engines, too: {others}"
    remedy = f"{hint}pass one of these names"
    raise UnknownTarget(f"the target {shown(named)} is not known", because=because, remedy=remedy)


def require_dtypes(target: Target, asked: Iterable[tuple[Rule, QConfig | None]]) -> None:
    """Raise ConfigurationError if a rule asks for a dtype that the target does not support; the error names the targets that do."""
    for rule, config in asked:
        if config is None:
            continue
        activations = [part.dtype for part in (config.input, config.output) if part is not None and part.dtype is not None]
        for kind, dtypes, offered in (("activations", activations, target.activations), ("weights", [config.weight.dtype], target.weights)):
            for dtype in dtypes:
                if dtype not in offered:
                    able = [other.name for other in TARGETS.values() if dtype in getattr(other, kind) and not other.consistency]
                    raise ConfigurationError(
                        f"{target.name} has no {dtype} {kind}",
                        because=f"the qconfig asks for them ({'its default' if rule == DEFAULT else rule}); "
                        f"{target.name} computes with {', '.join(offered)} {kind}",
                        remedy=f"ask for one of these, or compile for a target that has {dtype} {kind}: {', '.join(able)}",
                    )
