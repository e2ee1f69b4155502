"""Shared code of the layers over other toolkits: refusals of names and arguments, reading of attributes, tracing, running of programs."""

import functools
import inspect
import logging
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxquant as fxq
from fxquant.errors import ConfigurationError, FxQuantError
from fxquant.ir.graph import fact, resolve
from fxquant.prepared.undo import Having
from fxquant.support import logger
from fxquant.support.arguments import FLAG, Kind, checked

P = ParamSpec("P")
R = TypeVar("R")

BRANCH = FLAG.or_none("if it can be traced")


class Refusal(NamedTuple):
    """The reason why a name or an argument of another toolkit is not supported, and the remedy."""

    because: str
    remedy: str
    # Whether a value of the argument changes nothing, so that it is accepted; None: the default alone is.
    harmless: Callable[[Any], bool] | None = None

    def error(self, what: str) -> ConfigurationError:
        return ConfigurationError(what, because=self.because, remedy=self.remedy)


def _rows(name: str) -> dict[str, list[str]]:
    """Return the rows of a file with tabs, by their first column."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[1:]
    return {key: rest for key, *rest in (line.split("\t") for line in lines)}


TEXTS = _rows("refusals.tsv")  # what, because and remedy; braces hold the names of values, as for `str.format`
SIGNATURES = {key: eval(f"lambda {arguments}: None") for key, (arguments,) in _rows("signatures.tsv").items()}


def refused(key: str, /, **values: Any) -> ConfigurationError:
    """Return the error of a row of refusals.tsv, with these values in its texts."""
    what, because, remedy = (text.format(**values) for text in TEXTS[key])
    return ConfigurationError(what, because=because, remedy=remedy)


def refusals(group: str, **harmless: Callable[[Any], bool]) -> dict[str, Refusal]:
    """Return the refusals of one group of refusals.tsv by name, with the `harmless` values of each."""
    rows = [(key.partition(": ")[2], texts) for key, texts in TEXTS.items() if key.startswith(f"{group}: ")]
    return {name: Refusal(texts[1], texts[2], harmless.get(name)) for names, texts in rows for name in names.split()}


def foreign(toolkit: str, table: Mapping[str, Refusal] | None = None) -> Callable[..., Callable[[Callable[..., R]], Callable[..., R]]]:
    """Return a decorator that gives a function the signature of another toolkit's function, from signatures.tsv.

    The decorator takes the keywords of `checked`. An argument that the function lacks has no effect; where `table` has it, any value but
    None, the default and harmless ones raises ConfigurationError.
    """

    def takes(**kinds: Kind) -> Callable[[Callable[..., R]], Callable[..., R]]:
        def decorate(function: Callable[..., R]) -> Callable[..., R]:
            own = inspect.signature(function)
            own_table = {name: refusal for name, refusal in (table or {}).items() if name not in own.parameters}
            signature = own.replace(parameters=list(inspect.signature(SIGNATURES[f"{toolkit}.{function.__name__}"]).parameters.values()))

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> R:
                arguments = signature.bind(*args, **kwargs).arguments
                for name, value in arguments.items():
                    refusal, usual = own_table.get(name), signature.parameters[name].default
                    if refusal is None or usual is inspect.Parameter.empty or value is None or value == usual:
                        continue
                    if refusal.harmless is None or not refusal.harmless(value):
                        raise refusal.error(f"{function.__name__}({name}=…) cannot be done")
                return function(**{name: value for name, value in arguments.items() if name in own.parameters})

            call.__dict__["__signature__"] = signature
            return checked(**kinds)(call)

        return decorate

    return takes


def settings_of(config: Any) -> dict[str, Any]:
    """Return the non-empty settings of a custom config, PyTorch's object or its dict form, by name."""
    if config is None:
        return {}
    attributes = config if isinstance(config, Mapping) else vars(config)
    return {name: value for name, value in attributes.items() if not isinstance(value, Iterable) or list(value)}


def keeps_attributes(config: Any) -> bool:
    """Return whether a custom config has no entry besides the attributes to keep, which are kept anyway."""
    return not settings_of(config).keys() - {"preserved_attributes"}


def unserved(called: str, argument: str, because: str, remedy: str) -> ConfigurationError:
    """Return the error for an argument of a function whose value cannot be served."""
    return Refusal(because, remedy).error(f"{called}({argument}=…) cannot be done")


def unknown(argument: str, value: Any, choices: str) -> ConfigurationError:
    """Return the error for a value that is none of the known ones of an argument."""
    return Refusal(f"it is {choices}", "pass one of these").error(f"{argument}={value!r} is unknown")


def reading_attributes(model: nn.Module, read: Callable[[Any], Any]) -> Having:
    """Return a context in which the `qconfig` attributes on a model's modules are fxquant's, as `read` converts them."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return Having([(module, {"qconfig": read(module.__dict__["qconfig"])}) for module in modules if "qconfig" in module.__dict__])


def traced(
    called: str, model: nn.Module, example_inputs: Any, dynamic_shapes: Any, training_branch: bool | None, leaf: Any = None
) -> fx.GraphModule:
    """Return the graph of a model.

    dynamic_shapes   as `fxquant.trace` takes it; None: any batch size, or with a warning that of the example, if forward needs that
    training_branch  whether to keep what forward computes only in train mode; None: if it can be traced, otherwise with a warning
    """

    def trace(branch: bool) -> fx.GraphModule:
        options = fxq.Options(dynamic_shapes=dynamic_shapes, leaf=leaf, training_branch=branch)
        if dynamic_shapes is not None:
            return fxq.trace(model, example_inputs, options=options)
        try:
            graph = fxq.trace(model, example_inputs, options=options)
            if not any(_has_steps_in_batch(graph, node) for node in graph.graph.nodes):
                return graph
            shapes, why = (pytree.tree_map(_batch_second, example_inputs), "the batch is dimension 1: steps are in 0")
        except fxq.errors.TraceError as error:
            graph, shapes = None, {}
            why = f"the batch size is fixed to the example's, since forward cannot be traced at another\n{error}"
            raised = error
        try:
            other = fxq.trace(model, example_inputs, options=replace(options, dynamic_shapes=shapes))
        except fxq.errors.TraceError:
            if graph is None:
                raise raised from None
            return graph
        logger.warning("%s: %s", called, why)
        return other

    if training_branch is False:
        return trace(False)
    try:
        return trace(True)
    except fxq.errors.TraceError as error:
        if training_branch:
            raise
        without = trace(False)
        logger.warning("%s: what forward does only in train mode is left out, since it cannot be traced\n%s", called, error)
        return without


def _has_steps_in_batch(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node is a recurrent layer whose input (steps, N, C) has the batch as its steps."""
    layer = resolve(graph, str(node.target)) if node.op == "call_module" else None
    if not isinstance(layer, nn.RNNBase) or layer.batch_first:
        return False
    sizes = fact(node.all_input_nodes[0]).shape
    return len(sizes) == 3 and not isinstance(sizes[0], int)


def _batch_second(value: Any) -> Any:
    """Return the dynamic shape of an input whose batch is dimension 1, or 0 of a vector; None for any other value."""
    return {min(1, value.dim() - 1): torch.export.Dim("batch")} if isinstance(value, Tensor) and value.dim() else None


def run_program(called: str, install: Callable[[bool], None], arguments: Sequence[str]) -> int:
    """Run a program with the mirrored package installed; return 0, or 1 for an error of fxquant, printed with the program's line.

    FXQUANT_DEBUG=1 shows the whole traceback. The log is printed from INFO on, because it reports how arguments were interpreted.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m {called} program.py [arguments]\n\nruns an unedited program with fxquant in place of the toolkit")
        return 0 if arguments else 2
    program = Path(arguments[0])
    if not program.is_file():
        print(refused("program", program=program), file=sys.stderr)
        return 2
    logging.getLogger("fxquant").setLevel(logging.INFO)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    install(True)
    sys.argv[:] = list(arguments)
    sys.path.insert(0, str(program.resolve().parent))
    try:
        runpy.run_path(str(program), run_name="__main__")
    except FxQuantError as error:
        if os.environ.get("FXQUANT_DEBUG") not in (None, "", "0"):
            raise
        print(error, file=sys.stderr)
        if own := [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(program)]:
            print(f"  program  {program}:{own[-1].lineno}: {own[-1].line}", file=sys.stderr)
        return 1
    return 0
