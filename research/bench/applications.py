"""Programs that users of other allocators measure with: data frames and databases, compilers, media, scripts.

Like those of research.bench.inputs. Modules that Debian does not package come from the Python package index.
The wheels of DuckDB and Polars contain an allocator of their own, so that the rows of these say what is left
for a preloaded one: little. Arrow and PHP have one too, which an environment variable takes away.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from research.bench.inputs import WORDS, Program, cxx_source

_INDEX = "{} of the Python package index"

_DUCKDB = """
import duckdb

db = duckdb.connect(config={"threads": 2})
db.execute(\"\"\"create table orders as
    select i as id, hash(i) % 20000 as customer, hash(i + 7) % 365 as day,
    (hash(i + 13) % 10000) / 100.0 as price, 'note ' || (hash(i + 29) % 5000) as note
    from range(1500000) t(i)\"\"\")
db.execute(\"\"\"create table customers as
    select i as customer, 'group ' || i % 9 as name from range(20000) t(i)\"\"\")
for _ in range(3):
    print(db.execute(\"\"\"select name, count(*), count(distinct note)
        from orders join customers using (customer) group by name order by name\"\"\").fetchall())
    print(db.execute(\"\"\"select note, length(string_agg(id::varchar, ',' order by price, id)) as ids
        from orders where day < 60 group by note order by ids desc, note limit 1\"\"\").fetchone())
"""

_POLARS = """
import polars

numbers = polars.arange(0, 600_000, eager=True)
orders = polars.DataFrame({
    "id": numbers,
    "customer": numbers.hash(1) % 20_000,
    "price": (numbers.hash(3) % 10_000).cast(polars.Float64) / 100,
    "note": polars.select(polars.format("note {}", numbers.hash(4) % 5_000)).to_series(),
})
customers = polars.DataFrame({"customer": polars.arange(0, 20_000, eager=True).cast(polars.UInt64)})
customers = customers.with_columns(name=polars.format("group {}", polars.col("customer") % 9))
for _ in range(3):
    joined = orders.join(customers, on="customer").sort("name", "price", "id")
    print(joined.group_by("name").agg(polars.len(), polars.col("note").n_unique()).sort("name").rows())
    print(joined.group_by("note").agg(polars.col("id").cast(polars.String).str.join(",")).height)
"""

_ARROW = """
import io, os
import pyarrow, pyarrow.compute, pyarrow.csv, pyarrow.parquet
from pyarrow import compute

ids = pyarrow.array(range(400_000))
mixed = compute.bit_wise_and(compute.multiply(ids, 2654435761), 0xFFFFFFFF)
texts = compute.cast(compute.bit_wise_and(mixed, 4095), pyarrow.string())
orders = pyarrow.table({
    "id": ids,
    "customer": compute.bit_wise_and(mixed, 16383),
    "price": compute.divide(compute.cast(compute.bit_wise_and(mixed, 8191), pyarrow.float64()), 100.0),
    "note": compute.binary_join_element_wise("note", texts, " "),
})
names = pyarrow.array([f"group {number % 9}" for number in range(16384)])
customers = pyarrow.table({"customer": pyarrow.array(range(16384)), "name": names})
for _ in range(3):
    keys = [("name", "ascending"), ("price", "ascending"), ("id", "ascending")]
    joined = orders.join(customers, "customer").sort_by(keys)
    print(joined.group_by("name").aggregate([("note", "count_distinct")]).sort_by("name").to_pylist())
    written = io.BytesIO()
    pyarrow.csv.write_csv(joined, written)
    again = pyarrow.csv.read_csv(io.BytesIO(written.getvalue()))
    written = io.BytesIO()
    pyarrow.parquet.write_table(again, written)
    print(pyarrow.parquet.read_table(io.BytesIO(written.getvalue())).num_rows, flush=True)
# Arrow's threads may be at work still, and it does not survive an orderly end then.
os._exit(0)
"""

_SKLEARN = """
import numpy
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import SGDClassifier

random = numpy.random.default_rng(11)
words = numpy.array([f"word{number}" for number in range(3_000)])
texts = [" ".join(words[(3_000 * random.random(40) ** 3).astype(int)]) for _ in range(10_000)]
labels = random.integers(0, 5, len(texts))
vectors = TfidfVectorizer(ngram_range=(1, 2), min_df=3).fit_transform(texts)
line = SGDClassifier(max_iter=5, tol=None, random_state=1).fit(vectors, labels)
points = random.normal(size=(10_000, 20))
forest = RandomForestClassifier(n_estimators=30, n_jobs=2, random_state=1).fit(points, labels)
print(vectors.shape, round(line.score(vectors, labels), 2), round(forest.score(points, labels), 2))
"""

_PHP = r"""<?php
mt_srand(3);
for ($round = 0; $round < 2; $round++) {
    $rows = [];
    for ($i = 0; $i < 120000; $i++) {
        $tags = explode(" ", str_repeat("tag" . mt_rand(0, 99) . " ", 4));
        $rows[] = ["id" => $i, "name" => "name " . mt_rand(0, 5000), "tags" => $tags];
    }
    usort($rows, fn($a, $b) => $a["name"] <=> $b["name"] ?: $a["id"] <=> $b["id"]);
    $text = json_encode($rows);
    $names = [];
    foreach (json_decode($text, true) as $row) $names[$row["name"]][] = strtoupper($row["tags"][0]);
    echo strlen($text), " ", count($names), "\n";
}
"""

# Go's own memory is not malloc's; what C code allocates for it is. Go's threads come and go.
_GO = r"""package main

/*
#include <stdlib.h>
#include <string.h>
struct entry { struct entry *next; size_t size; char text[]; };
static struct entry *push(struct entry *list, size_t size) {
    struct entry *made = malloc(sizeof *made + size);
    made->next = list;
    made->size = size;
    memset(made->text, (int)size, size);
    return made;
}
static size_t release(struct entry *list) {
    size_t sum = 0;
    while (list) {
        struct entry *next = list->next;
        sum += list->size;
        free(list);
        list = next;
    }
    return sum;
}
*/
import "C"
import (
	"fmt"
	"unsafe"
)

func work(seed uint64, lists chan *C.struct_entry) {
	for round := 0; round < 200; round++ {
		var list *C.struct_entry
		for i := 0; i < 3000; i++ {
			seed = seed*6364136223846793005 + 1442695040888963407
			list = C.push(list, C.size_t(16+seed>>33%2000))
			if i%4 == 0 {
				text := C.CString(fmt.Sprint("order ", i))
				C.free(unsafe.Pointer(text))
			}
		}
		lists <- list
	}
}

func main() {
	lists, sums := make(chan *C.struct_entry, 16), make(chan C.size_t)
	for i := 0; i < 4; i++ {
		go work(uint64(i), lists)
	}
	for i := 0; i < 2; i++ {
		go func() {
			sum := C.size_t(0)
			for n := 0; n < 400; n++ {
				sum += C.release(<-lists)
			}
			sums <- sum
		}()
	}
	fmt.Println(<-sums + <-sums)
}
"""


def history(commits: int) -> Iterator[str]:
    """A repository for `git fast-import`: files of a hundred lines, of which each commit changes some."""
    rng = random.Random(12)
    files = [[" ".join(rng.choices(WORDS, k=8)) for _ in range(100)] for _ in range(60)]
    for number in range(commits):
        yield "commit refs/heads/master\n"
        yield f"committer Author <author@example.org> {1_700_000_000 + number * 60} +0000\n"
        yield "data 6\nchange\n"
        for index in rng.sample(range(len(files)), 4):
            files[index][rng.randrange(100)] = " ".join(rng.choices(WORDS, k=8))
            text = "\n".join(files[index]) + "\n"
            yield f"M 100644 inline folder{index % 7}/file{index}.txt\ndata {len(text)}\n{text}"
    yield "\n"


PROGRAMS = (
    Program(
        "duckdb",
        "1.5 million rows joined, grouped and sorted by DuckDB, in memory",
        "/usr/bin/python3 -I {inputs}/duck.py",
        {"duck.py": lambda: [_DUCKDB]},
        _INDEX.format("duckdb"),
        python_module="duckdb",
    ),
    Program(
        "polars",
        "a data frame of 600,000 rows joined, sorted and grouped by Polars",
        "env POLARS_MAX_THREADS=2 /usr/bin/python3 -I {inputs}/frame.py",
        {"frame.py": lambda: [_POLARS]},
        _INDEX.format("polars"),
        needs="/usr/bin/python3",
        python_module="polars",
    ),
    Program(
        "pyarrow",
        "tables of 400,000 rows joined, sorted, and written and read as CSV and Parquet by Arrow",
        "env ARROW_DEFAULT_MEMORY_POOL=system /usr/bin/python3 -I {inputs}/tables.py",
        {"tables.py": lambda: [_ARROW]},
        _INDEX.format("pyarrow"),
        needs="/usr/bin/python3",
        python_module="pyarrow",
    ),
    Program(
        "sklearn",
        "texts made vectors, and two classifiers fitted, one by two threads",
        "/usr/bin/python3 -I {inputs}/learn.py",
        {"learn.py": lambda: [_SKLEARN]},
        "python3-sklearn",
        python_module="sklearn",
    ),
    Program(
        "ffmpeg",
        "six seconds of a test picture filtered, scaled and encoded by two threads",
        "ffmpeg -v error -f lavfi -i testsrc2=size=1280x720:rate=25 -t 6 -threads 2 "
        "-vf hqdn3d,scale=960:540,unsharp -c:v mpeg4 -b:v 2M -f matroska -y film.mkv",
        {},
        "ffmpeg",
    ),
    Program(
        "git-gc",
        "a history of 3,000 commits imported and packed",
        """sh -c 'rm -rf repository && git init -q repository && cd repository && git fast-import --quiet """
        """< ../"$0" && git -c pack.threads=2 gc --quiet --aggressive' {inputs}/history""",
        {"history": lambda: history(3000)},
        "git",
        needs="git",
    ),
    Program(
        "clang",
        "a generated C++ file of many headers and templates compiled with -O1",
        "clang -std=c++17 -O1 -c -o big.o {inputs}/big.cpp",
        {"big.cpp": lambda: cxx_source(8)},
        "clang",
    ),
    Program(
        "php",
        "arrays of 120,000 rows sorted, and written and read as JSON, without PHP's own allocator",
        "env USE_ZEND_ALLOC=0 php -n {inputs}/rows.php",
        {"rows.php": lambda: [_PHP]},
        "php-cli",
        needs="php",
    ),
    Program(
        "cgo",
        "lists that goroutines allocate in C and others free",
        """sh -c '[ lists -nt "$0" ] || go build -o lists "$0"; exec ./lists' {inputs}/lists.go""",
        {"lists.go": lambda: [_GO]},
        "golang-go",
        needs="go",
    ),
)
