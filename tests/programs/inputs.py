"""Real programs with generated inputs, each one command: for tests that compare outputs, and for benchmarks.

A command names its inputs by the folder given, and writes its outputs into the current folder and to stdout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

WORDS = ["able", "baker", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliet"]
WORDS += ["kilo", "lima", "mike", "november", "oscar"]


@dataclass(frozen=True)
class Program:
    name: str
    binary: str
    package: str
    write_inputs: Callable[[Path], list[str]]
    """Writes the inputs into a folder, and returns the arguments."""


def write_lines(path: Path, lines: Iterator[str]) -> str:
    with path.open("w") as stream:
        stream.writelines(lines)
    return str(path)


def xml_orders(count: int) -> Iterator[str]:
    rng = random.Random(1)
    yield '<?xml version="1.0"?>\n<orders>\n'
    for i in range(count):
        items = "".join(
            f'<item sku="{rng.choice(WORDS)}-{rng.randrange(1000)}" count="{rng.randrange(1, 9)}"'
            f' price="{rng.randrange(100, 9999) / 100}"/>'
            for _ in range(rng.randrange(1, 6))
        )
        yield f'<order id="{i}" region="{rng.choice(WORDS)}"><note>{" ".join(rng.choices(WORDS, k=8))}</note>'
        yield f"{items}</order>\n"
    yield "</orders>\n"


XSLT = """<?xml version="1.0"?>
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:output method="xml" indent="yes"/>
  <xsl:template match="/orders">
    <report>
      <total orders="{count(order)}" able="{count(order[@region = 'able'])}"/>
      <xsl:apply-templates select="order"><xsl:sort select="note"/></xsl:apply-templates>
    </report>
  </xsl:template>
  <xsl:template match="order">
    <xsl:variable name="first" select="substring-before(note, ' ')"/>
    <line id="{@id}" first="{translate($first, 'abcdefgh', 'ABCDEFGH')}">
      <xsl:for-each select="item"><xsl:sort select="@sku"/><xsl:copy-of select="."/></xsl:for-each>
    </line>
  </xsl:template>
</xsl:stylesheet>
"""


def xalan_inputs(folder: Path) -> list[str]:
    source = write_lines(folder / "orders.xml", xml_orders(150_000))
    stylesheet = write_lines(folder / "report.xsl", iter([XSLT]))
    return ["-in", source, "-xsl", stylesheet, "-out", "report.xml"]


def postscript(pages: int) -> Iterator[str]:
    rng = random.Random(2)
    yield "%!PS-Adobe-3.0\n"
    for page in range(pages):
        yield "/Times-Roman findfont 9 scalefont setfont\n"
        for line in range(60):
            yield f"36 {760 - 12 * line} moveto ({page} {' '.join(rng.choices(WORDS, k=14))}) show\n"
        for _ in range(2000):
            x, y = rng.randrange(600), rng.randrange(800)
            colour = " ".join(f"{rng.random():.3f}" for _ in range(3))
            yield f"{colour} setrgbcolor newpath {x} {y} moveto "
            points = " ".join(str(rng.randrange(700)) for _ in range(6))
            yield f"{points} curveto closepath {rng.choice(['fill', 'stroke', 'eofill'])}\n"
        # A shaded image: it goes through the interpreter's own buffers, not through one big block.
        yield "gsave 50 50 translate 200 200 scale 128 128 8 [128 0 0 128 0 0] "
        yield "{ 128 string dup 0 1 127 { 2 copy dup 7 mul 255 and put pop dup } for pop } image grestore\n"
        yield "showpage\n"


def ghostscript_inputs(folder: Path) -> list[str]:
    source = write_lines(folder / "pages.ps", postscript(8))
    # Bands, so that two threads render.
    threads = ["-dMaxBitmap=0", "-dBufferSpace=4000000", "-dNumRenderingThreads=2"]
    return ["-q", "-dBATCH", "-dNOPAUSE", "-sDEVICE=ppmraw", "-r300", *threads, "-o", "page-%d.ppm", source]


SQL = """
PRAGMA threads = 2;
PRAGMA temp_store = memory;
CREATE TABLE t (id INTEGER PRIMARY KEY, k INTEGER, v TEXT);
WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < {rows})
INSERT INTO t SELECT i, (i * 2654435761) % 1000003, printf('value-%d-%d', i * 7919 % 100003, i % 13) FROM c;
CREATE INDEX t_v ON t (v, k);
SELECT k % 97, count(*), sum(id), min(v), max(v) FROM t GROUP BY 1 ORDER BY 1;
SELECT v, count(*), sum(k) FROM t GROUP BY v ORDER BY 3 DESC LIMIT 20;
"""


def sqlite_inputs(folder: Path) -> list[str]:
    script = write_lines(folder / "rows.sql", iter([SQL.format(rows=2_000_000)]))
    return ["-batch", "-bail", ":memory:", f".read {script}"]


def c_source(functions: int) -> Iterator[str]:
    rng = random.Random(3)
    yield "struct node { struct node *next; long key; double weight; char name[16]; };\n"
    for i in range(functions):
        yield f"static long work{i}(struct node *list, long n) {{\n    long sum = {i};\n"
        table = ", ".join(str(rng.randrange(1 << 30)) for _ in range(24))
        yield f"    static const long table[] = {{{table}}};\n"
        for _ in range(rng.randrange(4, 9)):
            step, mask = rng.randrange(1, 9), (1 << rng.randrange(3, 5)) - 1
            yield f"    for (long i = 0; i < n; i += {step}) {{\n"
            yield f"        switch (i & {mask}) {{\n"
            for case in range(mask // 2):
                factor = rng.randrange(1, 99)
                yield f"        case {case}: sum ^= table[(i + {case}) % 24] * {factor}; break;\n"
            yield "        default: sum += list->key; list = list->next ? list->next : list;\n"
            yield "        }\n    }\n"
        yield f"    list->weight = sum * {rng.random():.6f};\n"
        yield f"    return sum{f' + work{rng.randrange(i)}(list, n / 2)' if i else ''};\n}}\n"
    yield f"long entry(struct node *list, long n) {{ return work{functions - 1}(list, n); }}\n"


def gcc_inputs(folder: Path) -> list[str]:
    # Not every function is called, and those that are not would be dropped.
    return [
        "-O1",
        "-fkeep-static-functions",
        "-c",
        "-o",
        "big.o",
        write_lines(folder / "big.c", c_source(200)),
    ]


PYTHON = """
import concurrent.futures, hashlib, json, multiprocessing, random

def build(seed):
    rng = random.Random(seed)
    table = {f"{seed}-{i}": [rng.random() for _ in range(rng.randrange(20))] for i in range(20000)}
    blobs = [bytes([i % 251]) * rng.randrange(200000) for i in range(300)]
    for key in [key for i, key in enumerate(table) if i % 3 == 0]:
        del table[key]
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode())
    for blob in blobs:
        digest.update(blob)
    return digest.hexdigest()

if __name__ == "__main__":
    kept = [build(1)] + [str(i) * 3 for i in range(200000)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        print(*pool.map(build, range(8)), sep="\\n")
    # A fork of a process that has run threads, whose heap the children go on using.
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(*pool.map(build, range(8, 12)), sep="\\n")
    print(hashlib.sha256("".join(kept).encode()).hexdigest())
"""


def python_inputs(folder: Path) -> list[str]:
    return [write_lines(folder / "structures.py", iter([PYTHON]))]


def python_malloc_inputs(folder: Path) -> list[str]:
    # Python's own allocator keeps small blocks from malloc; this takes it away.
    return ["PYTHONMALLOC=malloc", "/usr/bin/python3", *python_inputs(folder)]


PROGRAMS = [
    Program("xalan", "xalan", "xalan", xalan_inputs),
    Program("ghostscript", "gs", "ghostscript", ghostscript_inputs),
    Program("sqlite3", "sqlite3", "sqlite3", sqlite_inputs),
    Program("gcc", "gcc", "gcc", gcc_inputs),
    # Not whichever Python runs the tests: wrappers of version managers are shell scripts.
    Program("python3", "/usr/bin/python3", "python3", python_inputs),
    Program("python3-malloc", "env", "coreutils", python_malloc_inputs),
]
