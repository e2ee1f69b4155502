"""Check the words of docstrings, comments, messages and pages, and names of variables: python docs/words.py [package or page …].

Plain technical English in the terms of docs/terms.md. Each finding is a file and line, the words, and what to write in their place.
Of a page the prose is checked, without code and tables.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = ("fxquant", "passes", "backends")
FOLDERS = {  # where each rule holds
    "names": (*LIBRARY, "tests", "benchmarks"),  # variables and parameters have none of NAMES
    "words": (*LIBRARY, "tests", "benchmarks"),  # docstrings, comments and literals have none of BANNED
    "beginnings": (*LIBRARY, "tests", "benchmarks"),  # docstrings do not begin as START
    "sentences": (*LIBRARY, "tests", "benchmarks"),  # the sentences of a module's docstring have at most LONGEST words
    "nouns": (*LIBRARY, "tests", "benchmarks"),  # the first lines of docstrings have none of WITHOUT_NOUN
}
NAMES = frozenset({"found", "known", "given", "made"})  # no variable has such a name: scales, matches, by_name say what it holds
PAGES = ("*.md", "docs/**/*.md", "backends/**/*.md")
OPTIONS = "dynamic_shapes|leaf|preserve|training_branch|adapt|integer_tail|dump|distributed|equalize|round_weights|correct_bias"
BANNED = {
    r"the way back": "backward",
    r"real numbers?|real tensors?": "float value, dequantized tensor",
    r"whole numbers?": "integer, int64 tensor",
    r"truth values?": "boolean",
    r"pass(es)? over memory": "memory traffic, kernel",
    r"(is|are|was|were) told|tells? apart": "reported, distinguished",
    r"loud(ness|er|est)?": "outlier sample, norm of a sample",
    r"settled?|settles": "apply, resolve",
    r"stands? (beside|behind|in front|alone)": "is next to, after, before, alone",
    r"puts? out": "returns",
    r"made anew|makes? anew": "recreated",
    r"written down": "materialized",
    r"joined|joining": "fused, concatenated, reduced",
    r"(?<!there )(is|are) no (?!longer|more)[a-z]+": "is not a",
    r"for the sake of": "for",
    r"what is left of": "the remainder of",
    r"spelling": "call form",
    rf"(pass|with|without|by) ({OPTIONS})": "options=fxq.Options(NAME=…), or: the option NAME",
}
ALONE = (  # what follows a demonstrative that has no noun
    r"(?=[.,;:?!)]|$| (is|are|was|were|has|have|had|does|do|did|can|cannot|may|must|will|would|need|of|in|at|on|by|for|from|to|with|without"
    r"|that|which|who|whose|where|when|while|if|unless|and|or|but|as|than|alone|again|before|after|beside|between|it|they|a|an|the|not|only"
    r"|one|ones|others|so|too|all|over|read|pass|say|keep|agree)\b| \()"
)
WITHOUT_NOUN = {  # in the first line of a docstring, which is read alone
    rf"(this|these|those){ALONE}|those (\w+ed|held)": "name what it is: this scale, these layers, the scales of weights",
    r"(of|among|between) them": "name what they are: the first row, each of the layers",
    r"(all|some|none|any|most|much|more|part|half|rest|nothing|one|first|last) of it": "name what it is: the whole file, a part of the sum",
    r"what (it|they|this|that)": "name who does it, and what: the dtypes that a target has",
}
START = re.compile(r"(The same|What|See)\b")
LONGEST = 35  # words of a sentence in the docstring of a module, or on a page
WRITTEN_OUT = {  # files whose string literals may hold such words, and why
    "backends/c/forms.py": "comments of the exported C program, which stays equal byte for byte"
}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, ast.AST]]:
    """Yield the line, the text and the node of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                yield first.lineno, first.value.value, node


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string literal that has a space and is not a docstring; an f-string in its constant parts."""
    docs = {(line, text) for line, text, _ in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and (node.lineno, node.value) not in docs:
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def refused(texts: Iterable[tuple[int, str]], table: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the line of the words of each regular expression of a table, and what to write in their place."""
    for line, text in texts:
        for words, better in table.items():
            for match in re.finditer(rf"\b({words})\b", prose(text), re.IGNORECASE):
                yield line + prose(text)[: match.start()].count("\n"), f"{match.group()!r}: write {better}"


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line of each local variable and parameter whose name is one of `NAMES`; fields of classes may have such names."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assignments = (each for node in classes for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign))
    fields = {id(target) for each in assignments for target in (each.targets if isinstance(each, ast.Assign) else [each.target])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES and id(node) not in fields:
            yield node.lineno, f"a variable {node.id!r}: name its content, as scales, matches or by_name do"
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield node.lineno, f"a parameter {node.arg!r}: name its content, as scales, matches or by_name do"


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every paragraph, heading and list item of a page; code, tables and pictures are left out."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    page = re.sub(r"(?ms)^ *```.*?^ *```$|<!--.*?-->", blank, page)
    page = re.sub(r"(?m)^(\|.*|!\[.*)$", "", page)
    page = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", page)
    for match in re.finditer(r"(?m)^(?!\s*$).*(?:\n(?! *(?:[-*#]|\d+\.) |\s*$).*)*", page):
        yield page[: match.start()].count("\n") + 1, re.sub(r"^ *(?:[-*#]+|\d+\.) ", "", match[0])


def of_page(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each finding in a page, and what is to be changed."""
    texts = list(paragraphs(page))
    yield from refused(texts, BANNED)
    for line, text in texts:
        for sentence in re.split(r"(?<=[.!?:;])(?:\*\*)?\s+", " ".join(prose(text).split())):
            if len(sentence.split()) > LONGEST and not re.search(" [=≤<·≥+] ", sentence):  # a formula is not prose
                yield line, f"a sentence of {len(sentence.split())} words: at most {LONGEST}: {sentence[:60]}…"


def prose(text: str) -> str:
    """Return a text without what is quoted from code."""
    return re.sub(r"`[^`]*`", "`code`", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of the paragraphs that are prose; formulas, lists and tables have wide spaces, and are left out."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.search(r"^(   |>>>)|\S   ", paragraph, re.MULTILINE):
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def findings(path: Path, source: str) -> Iterator[str]:
    """Yield a sentence (str) for each refused word in the docstrings, comments, strings and names of a file, or in the text of a page."""
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    rules = {rule for rule, folders in FOLDERS.items() if name.parts[0] in folders or name == path}
    if path.suffix == ".md":
        yield from (f"{name}:{line}: {change}" for line, change in of_page(source))
        return
    tree = ast.parse(source)
    changes = list(vague_names(tree)) if "names" in rules else []
    texts = [(line, text) for line, text, _ in docstrings(tree)] + list(comments(source))
    if name.as_posix() not in WRITTEN_OUT:
        texts += literals(tree)
    changes += refused(texts, BANNED) if "words" in rules else []
    for line, text, node in docstrings(tree):
        if "beginnings" in rules and START.match(text.strip()):
            changes.append((line, f"a docstring begins with {text.split()[0]!r}: begin with a verb"))
        if "nouns" in rules:
            changes += refused([(line, text.strip().partition("\n")[0])], WITHOUT_NOUN)
        if "sentences" in rules and isinstance(node, ast.Module):
            lengths = (len(sentence.split()) for sentence in sentences(text))
            changes += [(line, f"a sentence of {length} words: at most {LONGEST}") for length in lengths if length > LONGEST]
    yield from (f"{name}:{line}: {change}" for line, change in changes)


def files(places: list[str]) -> Iterator[Path]:
    """Yield the files of these packages and pages, or of all that are checked."""
    for place in places or sorted({folder for folders in FOLDERS.values() for folder in folders}):
        yield from sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
    if not places:
        yield from sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})


def main(places: list[str]) -> int:
    """Print the banned words in these packages and pages, by default in all that are checked; return their number."""
    count = 0
    for path in files(places):
        for finding in findings(path, path.read_text(encoding="utf-8")):
            print(finding)
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
