"""The language of the docs: a reading grade, a glossary that has every term, words for every image, no riddles.

The grade is compared with that of the PyTorch tutorials on the same subjects, measured by the same function.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from reading_grade import grade, num_syllables, paragraphs_of_markdown, paragraphs_of_restructured_text

ROOT = Path(__file__).parents[2]
GENERATED = {"reference"}  # folders of docs/ that a script makes from docstrings
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in ROOT.glob("docs/**/*.md")
    if not GENERATED & set(path.relative_to(ROOT).parts)
)

# The median of 26 PyTorch tutorials on distributed training, by `python tests/pool/reading_grade.py`, measured on
# 2026-11-17 in a copy of github.com/pytorch/tutorials of 2026-04-21 (redirects left out). They are, from 8.3 to 13.1:
#   beginner_source: ddp_series_{intro,theory,multigpu,fault_tolerance}, dist_overview
#   intermediate_source: FSDP1_tutorial, FSDP_tutorial, FSDP_advanced_tutorial, TP_tutorial, ddp_tutorial, dist_tuto,
#     ddp_series_{minGPT,multinode}, monarch_distributed_tutorial, pipelining_tutorial, rpc_tutorial,
#     rpc_{async_execution,param_server_tutorial}
#   advanced_source: rpc_ddp_tutorial
#   recipes_source: distributed_{async_checkpoint_recipe,checkpoint_recipe,comm_debug_mode,device_mesh},
#     zero_redundancy_optimizer
#   unstable_source: context_parallel, flight_recorder_tutorial
PYTORCH_TUTORIALS_GRADE = 10.6


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words of the field. A page that uses one needs its entry in docs/notation.md.
JARGON = words("""
    all-gather all-reduce all-to-all axis backend broadcast bubble bucket catalog checkpoint collective compression
    deadlock elastic engine exposed goodput hybrid kernel launcher layout ledger makespan master mesh microbatch MFU
    offload outlier overlap pipeline plan preemption prefetch rank reduce-scatter rendezvous replica reshard residual
    ring schedule shard slice soak stage store straggler stream throughput tree unit verdict world ZeRO
""")

# Abbreviations that need no entry: everyday ones, and the names of products, models and files.
PLAIN = words("""
    AND API APIs ARM ASCII AWS CI CLI CONTRIBUTING CPU CPUs CSS CSV CUDA DNS GB GCP GPU GPUs HTML HTTP HTTPS ID IDs IP
    IO JSON KB MB MIT NOT NVIDIA OK OR OS OSS OUTSIDE PDF PID PNG PR RAM README SHA SHA256 SQL SSD SSH SVG TB TODO URL
    URLs UTC UTF VM YAML AMD BERT DGX GPT GPTs IBM LM MPT
""")
_SIGNALS = re.compile(r"SIG[A-Z]+\d?s?")
_PRODUCTS = re.compile(r"[A-Z]{1,2}\d{2,4}s?")  # A100, GB300

# Italics that stress an ordinary word. All other words in italics are terms.
EMPHASIS = frozenset(
    {"all", "between", "compute", "facts", "goes on", "italics", "limited by", "on our group", "sample", "smallest"}
)

BANNED = {
    "is told: say who reports what": r"\b(?:is|are|was|were|been) told\b(?! apart)",
    "is said: say who says it": r"\b(?:is|are|was|were) said (?:to|that|not)\b",
    "made anew: say allocates, or makes a new one": r"\bmade anew\b",
    "dear: say expensive": r"\bdear(?:er|ly)?\b",
    "nobody's: name who": r"\bnobody's\b",
    "a sentence that begins with its verb: put the subject first": (
        r"(?:^|[.!?] )(?:Told|Shown|Measured|Named|Printed|Counted|Kept|Taken|Refused|Known) (?:is|are|was|were)\b"
    ),
    "an archaic word": r"\b(?:whence|whosoever|thereof|therein|heretofore|foretold|lest)\b",
}

_IMAGE = re.compile(r"!\[([^\]]*)\]\(|<img\b([^>]*)>")
_ITALICS = re.compile(r"(?<![*\w`\\])\*(?![*\s])([^*\n]+?)(?<![\s*])\*(?![*\w])")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
COLUMNS = 96
_ACRONYM = re.compile(r"\b[A-Z]{2,}\d*s?\b")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def glossary() -> frozenset[str]:
    """Returns the words in bold below the heading of the glossary, in small letters."""
    _, _, entries = read("docs/notation.md").partition("\n## Glossary\n")
    return frozenset(word.lower() for word in re.findall(r"\*\*([^*]+)\*\*", entries))


def is_defined(term: str, words: frozenset[str]) -> bool:
    term = re.sub(r"\s+", " ", term.lower())
    return any(form in words for form in (term, term.removesuffix("s"), term.removesuffix("es"), term + "s"))


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "x", text)


def undefined_terms(text: str, words: frozenset[str]) -> set[str]:
    """Returns terms of a page that the glossary lacks: words in italics, jargon, abbreviations."""
    prose = "\n".join(paragraphs_of_markdown(text))
    italics = {found for found in _ITALICS.findall(without_code(text)) if len(found.split()) <= 3}
    terms = {term for term in italics if term.lower() not in EMPHASIS}
    terms |= {word for word in JARGON if re.search(rf"\b{word}s?\b", prose, re.IGNORECASE)}
    for short in _ACRONYM.findall(prose):
        if short not in PLAIN and not _SIGNALS.fullmatch(short) and not _PRODUCTS.fullmatch(short):
            terms.add(re.sub(r"\d+$", "", short))
    return {term for term in terms if not is_defined(term, words)}


def images_without_words(text: str) -> list[str]:
    """Returns the images whose alternative text has fewer than three words."""
    found = []
    for image in _IMAGE.finditer(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = image[1] if image[1] is not None else "".join(re.findall(r'alt="([^"]*)"', image[2]))
        if len(words.split()) < 3:
            found.append(image[0])
    return found


def riddles(text: str) -> list[str]:
    """Returns each sentence part that is banned, with the rule."""
    paragraphs = paragraphs_of_markdown(text)
    paragraphs += [line for line in without_code(text).splitlines() if line.startswith("|")]
    return [
        f"{rule}: ...{each[max(0, hit.start() - 30) : hit.end() + 30]}..."
        for each in paragraphs
        for rule, pattern in BANNED.items()
        for hit in re.finditer(pattern, each)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reads_at_least_as_easily_as_the_tutorials_of_pytorch(page: str) -> None:
    assert grade(paragraphs_of_markdown(read(page))) <= PYTORCH_TUTORIALS_GRADE


@pytest.mark.parametrize("page", PAGES)
def test_the_glossary_has_every_term_of_a_page(page: str) -> None:
    assert not undefined_terms(read(page), glossary())


@pytest.mark.parametrize("page", PAGES)
def test_images_have_words_for_those_who_do_not_see_them(page: str) -> None:
    assert not images_without_words(read(page))


@pytest.mark.parametrize("page", PAGES)
def test_no_riddles(page: str) -> None:
    assert not riddles(read(page))


SCRIPTS = [path.read_text(encoding="utf-8") for path in (ROOT / "bench").rglob("*.py")]  # pages show some as they are


@pytest.mark.parametrize("page", [*PAGES, "README.md", "CONTRIBUTING.md"])
def test_code_is_as_wide_as_the_column_of_the_book(page: str) -> None:
    """A wider block scrolls, and a reader misses its end."""
    wide = [line for block in _FENCED.findall(read(page)) for line in block.splitlines() if len(line) > COLUMNS]
    assert not [line for line in wide if not any(line.removeprefix("+") in script for script in SCRIPTS)]


def test_no_page_has_a_notation_of_its_own() -> None:
    own = [page for page in PAGES if re.search(r"\*\*Notation\.?\*\*", read(page))]
    assert not own, "symbols are those of docs/notation.md: link it, and define beside a formula only what it lacks"


# The measures themselves.


def test_long_words_and_long_sentences_raise_the_grade() -> None:
    plain = "The rank waits. Then it sends a part."
    heavy = (
        "Notwithstanding the aforementioned considerations, participating processes synchronise their intermediate "
        "representations prior to any subsequent computation, irrespective of communication characteristics."
    )
    assert grade([plain]) < 3 < PYTORCH_TUTORIALS_GRADE < grade([heavy])


def test_syllables_are_counted() -> None:
    known = {"rank": 1, "time": 1, "used": 1, "gather": 2, "waited": 2, "all-reduce": 3, "parallel": 3, "memory": 3}
    assert {word: num_syllables(word) for word in known} == known


def test_code_tables_and_headings_are_no_prose() -> None:
    page = "# Heading\n\nOne word.\n\n```python\nx = 1\n```\n\n    code\n\n| a | table |\n\n- An item\n  of two lines"
    assert paragraphs_of_markdown(page) == ["One word.", "An item of two lines"]
    other = "Title\n=====\n\nOne word.\n\n.. code-block:: python\n\n    x = 1\n\n.. note:: left out\n"
    assert paragraphs_of_restructured_text(other) == ["One word."]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("A *flurb* is a new thing.", {"flurb"}),
        ("The straggler waits.", {"straggler"}),
        ("They use QRDP between hosts.", {"QRDP"}),
        ("Two *buckets* on a GPU, *between* hosts, with SIGTERM on an H100.", set()),
        ("`*not italics*` and 2 * 3 * 4", set()),
    ],
)
def test_a_term_without_an_entry_is_found(text: str, missing: set[str]) -> None:
    assert undefined_terms(text, frozenset({"bucket"})) == missing


def test_an_image_without_words_is_found() -> None:
    bad = '![](a.svg) ![ring](b.svg) <img src="c.svg">'
    good = '![Four ranks in a ring](d.svg) <img src="e.svg" alt="Two trees of ranks">'
    assert images_without_words(f"{bad} {good}") == ["![](", "![ring](", '<img src="c.svg">']


@pytest.mark.parametrize(
    "text",
    [
        "A rank is told that it is last.",
        "Runs were said not to fit.",
        "It is never made anew.",
        "Lateness is dear.",
        "It works. Shown are the errors before and after.",
        "| a rank | is told so |",
    ],
)
def test_a_banned_phrase_is_found(text: str) -> None:
    assert len(riddles(text)) == 1


def test_plain_sentences_pass() -> None:
    assert not riddles("The monitor reports a rank that arrives last. The output shows the errors.")
