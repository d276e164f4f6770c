"""Real programs with generated inputs, each one command: for tests that compare outputs, and for benchmarks.

A command names its inputs by the folder given, and writes its outputs into the current folder and to
stdout. The inputs are the same bytes on every machine. Standard library only: scripts import this without
an environment of their own.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

WORDS = ["able", "baker", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliet"]
WORDS += ["kilo", "lima", "mike", "november", "oscar"]


@dataclass(frozen=True)
class Program:
    """A program, its inputs, and its command."""

    name: str
    summary: str
    command: str
    """As for a shell; {inputs} is the folder of the inputs."""
    inputs: Mapping[str, Callable[[], Iterable[bytes] | Iterable[str]]]
    """The content of each input file, by name."""
    package: str
    needs: str = ""
    """The binary that a shell or env runs, or that the package must bring too."""
    python_module: str | None = None
    """A module of /usr/bin/python3 that the program needs."""
    quick: bool = False
    """Belongs to the quick suite too."""
    bursts: bool = False
    """Works in bursts, with pauses between them: of the family periodic."""

    @property
    def binary(self) -> str:
        return self.command.split()[0]

    def arguments(self, folder: Path) -> list[str]:
        return [word.replace("{inputs}", str(folder)) for word in shlex.split(self.command)[1:]]

    def write_inputs(self, folder: Path) -> list[str]:
        """Writes the inputs into a folder, and returns the arguments."""
        for name, pieces in self.inputs.items():
            with (folder / name).open("wb") as stream:
                stream.writelines(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces())
        return self.arguments(folder)


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


# Not with multiples of one number modulo another: rows with the same k % 97 then lie at few distances, and
# time depends on whether a processor guesses the next distance, which one shorter block in between spoils.
SQL = """
PRAGMA threads = 2;
PRAGMA temp_store = memory;
CREATE TABLE t (id INTEGER PRIMARY KEY, k INTEGER, v TEXT);
WITH RECURSIVE c(i, x) AS
    (SELECT 1, 1 UNION ALL SELECT i + 1, (x * 1103515245 + 12345) & 2147483647 FROM c WHERE i < {rows})
INSERT INTO t SELECT i, (x >> 8) % 1000003, printf('value-%d-%d', (x >> 6) % 100003, i % 13) FROM c;
CREATE INDEX t_v ON t (v, k);
SELECT k % 97, count(*), sum(id), min(v), max(v) FROM t GROUP BY 1 ORDER BY 1;
SELECT v, count(*), sum(k) FROM t GROUP BY v ORDER BY 3 DESC LIMIT 20;
"""


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


LUA = """
local function tree(depth)
    if depth == 0 then return {} end
    return {tree(depth - 1), tree(depth - 1)}
end

local function count(node)
    return node[1] and 1 + count(node[1]) + count(node[2]) or 1
end

local kept, nodes = tree(17), 0
for _ = 1, 100 do nodes = nodes + count(tree(12)) end

local words = {}
for i = 1, 300000 do
    words[i] = string.rep(string.char(97 + i % 26), i % 61) .. i
    if i % 3 == 0 then
        local j = (i * 2654435761 >> 8) % i + 1
        words[j] = words[j]:upper() .. i
    end
end
table.sort(words)
local text, seen, distinct, length = table.concat(words, ","), {}, 0, 0
for word in text:gmatch("[^,]+") do
    local letters = word:gsub("%d+", "-")
    if not seen[letters] then distinct = distinct + 1 end
    seen[letters] = (seen[letters] or 0) + 1
    length = length + #word
end
print(nodes, count(kept), distinct, length, #text)
"""

# Factors a product of two primes, as a circuit of bits: the solver allocates clauses, learnt and forgotten.
SMT = """(set-logic QF_BV)
(declare-fun p () (_ BitVec 40))
(declare-fun q () (_ BitVec 40))
(assert (= (bvmul p q) (_ bv{product} 40)))
(assert (bvult p (_ bv{limit} 40)))
(assert (bvult q (_ bv{limit} 40)))
(assert (bvugt p (_ bv1 40)))
(assert (bvule p q))
(check-sat)
(get-model)
"""


def picture(width: int, height: int) -> Iterator[bytes]:
    """A picture in PPM: a grain that each row shifts, lighter towards the right and the bottom."""
    rng = random.Random(5)
    grain = [
        bytes(value // 4 + shade for value in rng.randbytes(2 * 3 * width)) for shade in range(0, 192, 8)
    ]
    yield f"P6\n{width} {height}\n255\n".encode()
    for y in range(height):
        shift, shade = 3 * rng.randrange(width), y * len(grain) // height
        yield grain[shade][shift : shift + 3 * width]


DATA_FRAME = """
import numpy, pandas

random = numpy.random.default_rng(9)
words = numpy.array("able baker charlie delta echo foxtrot golf hotel india juliet".split(), dtype=object)
rows = 400_000
orders = pandas.DataFrame({
    "customer": random.integers(0, 20_000, rows),
    "region": words[random.integers(0, len(words), rows)],
    "day": pandas.to_datetime("2024-01-01") + pandas.to_timedelta(random.integers(0, 365, rows), "D"),
    "price": random.integers(1, 10_000, rows) / 100,
})
customers = pandas.DataFrame({"customer": numpy.arange(20_000), "segment": random.integers(0, 9, 20_000)})
for _ in range(3):
    joined = orders.merge(customers, on="customer").sort_values(["region", "day", "price"])
    joined["name"] = joined["region"].str.upper() + "-" + joined["segment"].astype(str)
    monthly = joined.groupby(["name", joined["day"].dt.month])["price"].agg(["sum", "count", "median"])
    wide = joined.pivot_table(index="customer", columns="region", values="price", aggfunc="sum", fill_value=0)
    kept = joined[joined["price"] > joined.groupby("region")["price"].transform("mean")]
    print(len(monthly), wide.shape, len(kept), round(monthly["sum"].sum(), 2))
joined.head(100_000).to_csv("orders.csv", index=False)
print(len(pandas.read_csv("orders.csv", parse_dates=["day"])))
"""


THUMBNAILS = """
import time
from concurrent.futures import ThreadPoolExecutor
from PIL import Image, ImageFilter

def thumbnails(number):
    image = Image.effect_mandelbrot((1500 + number, 1000), (-2.0, -1.2, 0.8, 1.2), 16).convert("RGB")
    small = [image.resize((size, size)).filter(ImageFilter.GaussianBlur(2)) for size in (1000, 500, 250)]
    return sum(len(each.tobytes()) for each in small)

with ThreadPoolExecutor(4) as pool:
    for burst in range(6):
        print(sum(pool.map(thumbnails, range(8))), flush=True)
        time.sleep(2)
"""

WSGI = """
def app(environ, start_response):
    parts = [bytes(1000 + i * 7919 % 60000) for i in range(800)]
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(sum(map(len, parts))).encode()]
"""

WSGI_CLIENT = """
import http.client, os, socket, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor

class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("gunicorn.sock")

def ask(number):
    connection = Connection("localhost")
    connection.request("GET", "/")
    answer = connection.getresponse().read()
    connection.close()
    return int(answer)

workers = ["--workers", "3", "--threads", "4", "--bind", "unix:gunicorn.sock", "--log-level", "critical"]
folder = os.path.dirname(os.path.abspath(__file__))
server = subprocess.Popen(["/usr/bin/gunicorn", "--pythonpath", folder, *workers, "service:app"])
while not os.path.exists("gunicorn.sock"):
    if server.poll() is not None:
        sys.exit("gunicorn did not start")
    time.sleep(0.05)
with ThreadPoolExecutor(4) as pool:
    for burst in range(6):
        print(sum(pool.map(ask, range(48))), flush=True)
        time.sleep(2)
server.terminate()
sys.exit(server.wait())
"""

JAVA_BURSTS = """
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.stream.IntStream;

public class Bursts {
    static long burst(int seed) {
        ArrayList<ByteBuffer> held = new ArrayList<>();
        long bytes = 0;
        for (int i = 0; i < 500; i++) {
            ByteBuffer buffer = ByteBuffer.allocateDirect(1000 + (seed * 500 + i) * 7919 % 200000);
            for (int at = 0; at < buffer.capacity(); at += 512) buffer.put(at, (byte) 1);
            bytes += buffer.capacity();
            held.add(buffer);
        }
        return bytes;
    }

    public static void main(String[] arguments) throws Exception {
        for (int round = 0; round < 6; round++) {
            System.out.println(IntStream.range(0, 4).parallel().mapToLong(Bursts::burst).sum());
            System.gc();
            Thread.sleep(2000);
        }
    }
}
"""


def cxx_source(types: int) -> Iterator[str]:
    """C++ of much header and many instances of templates."""
    headers = "algorithm functional iostream map memory regex set string unordered_map variant vector"
    yield "".join(f"#include <{header}>\n" for header in headers.split())
    for i in range(types):
        yield f"struct Type{i} {{ long key; std::string name; std::vector<double> values; }};\n"
        yield f"bool operator<(const Type{i} &a, const Type{i} &b) {{ return a.key < b.key; }}\n"
        yield f"std::map<std::string, std::vector<Type{i}>> group{i}(std::vector<Type{i}> all) {{\n"
        yield f"    std::map<std::string, std::vector<Type{i}>> found;\n"
        yield "    std::sort(all.begin(), all.end());\n"
        yield "    for (auto &each : all) found[each.name].push_back(std::move(each));\n"
        yield f"    std::unordered_map<long, std::shared_ptr<Type{i}>> shared;\n"
        yield "    for (auto &[name, types] : found)\n"
        yield f"        shared[{i}] = std::make_shared<Type{i}>(types.front());\n"
        yield f"    std::function<bool(const Type{i} &)> large = [&](const Type{i} &type) {{\n"
        yield "        return shared.count(type.key) > 0; };\n"
        yield "    for (auto &[name, types] : found)\n"
        yield "        types.erase(std::remove_if(types.begin(), types.end(), large), types.end());\n"
        yield "    return found;\n}\n"


def rust_source(types: int) -> Iterator[str]:
    """A crate with many types, derived traits and generic collections."""
    yield "use std::collections::{BTreeMap, HashMap};\n"
    for i in range(types):
        yield "#[derive(Clone, Debug, Default, PartialEq, PartialOrd)]\n"
        yield f"pub struct Type{i} {{ pub key: u64, pub name: String, pub values: Vec<f64> }}\n"
        yield f"pub fn group{i}(mut all: Vec<Type{i}>) -> BTreeMap<String, Vec<Type{i}>> {{\n"
        yield "    all.sort_by(|a, b| a.partial_cmp(b).unwrap());\n"
        yield "    let mut found = BTreeMap::new();\n"
        yield "    for each in all { found.entry(each.name.clone()).or_insert_with(Vec::new).push(each); }\n"
        yield "    let counts: HashMap<u64, usize> = found.values().flatten()\n"
        yield f"        .map(|t: &Type{i}| (t.key, {i})).collect();\n"
        yield "    for each in found.values_mut() { each.retain(|t| counts.contains_key(&t.key)); }\n"
        yield "    found\n}\n"


# The JVM's own memory: buffers outside of its heap, and zlib's.
JAVA = """
import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.Random;
import java.util.zip.CRC32;
import java.util.zip.Deflater;
import java.util.zip.Inflater;

public class Churn {
    static long work(int seed) throws Exception {
        Random random = new Random(seed);
        ArrayDeque<ByteBuffer> kept = new ArrayDeque<>();
        CRC32 sum = new CRC32();
        byte[] plain = new byte[16384], packed = new byte[20000], again = new byte[16384];
        for (int round = 0; round < 3000; round++) {
            for (int i = 0; i < plain.length; i++) plain[i] = (byte) (97 + (i & 3) + random.nextInt(4));
            Deflater deflater = new Deflater(1);
            deflater.setInput(plain);
            deflater.finish();
            int length = deflater.deflate(packed);
            deflater.end();
            ByteBuffer buffer = ByteBuffer.allocateDirect(length + random.nextInt(60000));
            buffer.put(packed, 0, length).flip();
            kept.add(buffer);
            if (kept.size() < 400) continue;
            ByteBuffer oldest = kept.remove();
            byte[] bytes = new byte[oldest.remaining()];
            oldest.get(bytes);
            Inflater inflater = new Inflater();
            inflater.setInput(bytes);
            sum.update(again, 0, inflater.inflate(again));
            inflater.end();
        }
        return sum.getValue();
    }

    public static void main(String[] arguments) throws Exception {
        long[] sums = new long[4];
        Thread[] threads = new Thread[sums.length];
        for (int i = 0; i < threads.length; i++) {
            int number = i;
            threads[i] = new Thread(() -> {
                try {
                    sums[number] = work(number);
                } catch (Exception error) {
                    throw new RuntimeException(error);
                }
            });
            threads[i].start();
        }
        for (Thread thread : threads) thread.join();
        for (long sum : sums) System.out.println(sum);
    }
}
"""


XALAN = Program(
    "xalan",
    "an XSLT transformation of 150,000 orders, sorted",
    "xalan -in {inputs}/orders.xml -xsl {inputs}/report.xsl -out report.xml",
    {"orders.xml": lambda: xml_orders(150_000), "report.xsl": lambda: [XSLT]},
    "xalan",
)
PROGRAMS = (
    XALAN,
    # In bands, so that two threads render.
    Program(
        "ghostscript",
        "8 pages of text and curves rendered in bands, by two threads",
        "gs -q -dBATCH -dNOPAUSE -sDEVICE=ppmraw -r300 -dMaxBitmap=0 -dBufferSpace=4000000 "
        "-dNumRenderingThreads=2 -o page-%d.ppm {inputs}/pages.ps",
        {"pages.ps": lambda: postscript(8)},
        "ghostscript",
    ),
    Program(
        "sqlite3",
        "2 million rows inserted, indexed and grouped in memory",
        "sqlite3 -batch -bail :memory: '.read {inputs}/rows.sql'",
        {"rows.sql": lambda: [SQL.format(rows=2_000_000)]},
        "sqlite3",
        quick=True,
    ),
    # Not every function is called, and those that are not would be dropped.
    Program(
        "gcc",
        "a generated C file of 150 functions compiled with -O1",
        "gcc -O1 -fkeep-static-functions -c -o big.o {inputs}/big.c",
        {"big.c": lambda: c_source(150)},
        "gcc",
    ),
    # Not whichever Python runs the tests: wrappers of version managers are shell scripts.
    Program(
        "python3",
        "dictionaries, JSON and blobs made and dropped, in threads and forks",
        "/usr/bin/python3 {inputs}/structures.py",
        {"structures.py": lambda: [PYTHON]},
        "python3",
    ),
    # Python's own allocator keeps small blocks from malloc; this takes it away.
    Program(
        "python3-malloc",
        "the same with Python's own allocator out of the way",
        "env PYTHONMALLOC=malloc /usr/bin/python3 {inputs}/structures.py",
        {"structures.py": lambda: [PYTHON]},
        "python3",
        needs="/usr/bin/python3",
    ),
)

# For the benchmark suite only.
FURTHER_PROGRAMS = (
    Program(
        "z3",
        "a product of two primes factored as a circuit of bits",
        "z3 {inputs}/factors.smt2",
        {"factors.smt2": lambda: [SMT.format(product=900_001 * 1_000_003, limit=1 << 20)]},
        "z3",
    ),
    # Three operations of threads each, one program after the other: the tool does one at a time.
    Program(
        "vips",
        "a picture of 12 million pixels sharpened, searched for edges and turned, by threads",
        """sh -c 'vips sharpen "$0" sharp.ppm --sigma 2 && vips canny sharp.ppm edges.ppm && """
        """vips similarity sharp.ppm turned.ppm --angle 7 --scale 0.9' {inputs}/picture.ppm""",
        {"picture.ppm": lambda: picture(4000, 3000)},
        "libvips-tools",
        needs="vips",
    ),
    # Small buffers, so that tables are flushed and merged at this size too.
    Program(
        "rocksdb",
        "db_bench: 200,000 keys written and read at random by two threads, tables merged behind",
        "db_bench --benchmarks=fillrandom,readrandom --num=100000 --reads=100000 --value_size=200 "
        "--write_buffer_size=4194304 --cache_size=8388608 --compression_type=none "
        "--threads=2 --seed=1 --db=database --wal_dir=database",
        {},
        "rocksdb-tools",
    ),
    Program(
        "lua",
        "trees, strings and tables made and dropped",
        "lua5.4 {inputs}/churn.lua",
        {"churn.lua": lambda: [LUA]},
        "lua5.4",
        quick=True,
    ),
    Program(
        "pandas",
        "a data frame of 400,000 rows joined, sorted, grouped, pivoted and written",
        "/usr/bin/python3 -I {inputs}/frame.py",
        {"frame.py": lambda: [DATA_FRAME]},
        "python3-pandas",
        python_module="pandas",
    ),
    Program(
        "g++",
        "a generated C++ file of many headers and templates compiled with -O1",
        "g++ -std=c++17 -O1 -c -o big.o {inputs}/big.cpp",
        {"big.cpp": lambda: cxx_source(12)},
        "g++",
    ),
    # Not a version manager's.
    Program(
        "rustc",
        "a generated Rust crate of many types and generic collections compiled with -O",
        "/usr/bin/rustc --edition 2021 --crate-type rlib --crate-name big -O {inputs}/big.rs",
        {"big.rs": lambda: rust_source(10)},
        "rustc",
    ),
    Program(
        "java",
        "direct buffers and zlib streams made and dropped by four threads of a JVM",
        "java -Xmx256m -XX:MaxDirectMemorySize=256m {inputs}/Churn.java",
        {"Churn.java": lambda: [JAVA]},
        "default-jdk-headless",
        needs="javac",
    ),
    Program(
        "periodic-pillow",
        "eight pictures scaled and blurred by four threads of Python, six times, with pauses of 2 s",
        "/usr/bin/python3 -I {inputs}/thumbnails.py",
        {"thumbnails.py": lambda: [THUMBNAILS]},
        "python3-pil",
        python_module="PIL",
        bursts=True,
    ),
    Program(
        "periodic-gunicorn",
        "requests of 25 MB to three workers of four threads each, six times 48, with pauses of 2 s",
        "/usr/bin/python3 -I {inputs}/client.py",
        {"client.py": lambda: [WSGI_CLIENT], "service.py": lambda: [WSGI]},
        "gunicorn",
        needs="gunicorn",
        bursts=True,
    ),
    Program(
        "periodic-java",
        "2,000 direct buffers of up to 200 kB made by the threads of a JVM, six times, with pauses of 2 s",
        "java -Xmx128m -XX:MaxDirectMemorySize=1g {inputs}/Bursts.java",
        {"Bursts.java": lambda: [JAVA_BURSTS]},
        "default-jdk-headless",
        needs="javac",
        bursts=True,
    ),
)
